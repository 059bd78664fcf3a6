"""Lengths, arrivals and traces: distributions as stated, seeded streams, errors by file and row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.requests import build_requests
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.run.traffic import is_trace
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.storage.files import public_datasets
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load import requests as wl
from sarathi_sim.simulator.load.requests import describe_workload, peak_rate, shared_tokens
from sarathi_sim.simulator.load.trace import Reading, Trace, read_trace
from tests.experiments.small_config import called, refused
from tests.sampled import needs_datasets

SOURCE = Source("here.yaml", "one", {}, ())
SCENARIO = {"model": "m", "device": "d", "policy": {"name": "orca"}}

seeds = st.integers(0, 2**63 - 1)
lengths = st.integers(1, 5000)


@given(seeds, st.floats(0, 3), lengths, st.integers(0, 5000), st.integers(1, 2000))
def test_zipf_stays_on_its_grid(seed: int, theta: float, low: int, span: int, step: int) -> None:
    found = wl.zipf_lengths(50, theta, low, low + span, step, wl.stream(seed, "lengths"))
    assert found.min() >= low
    assert found.max() <= low + span
    assert not ((found - low) % step).any()
    again = wl.zipf_lengths(50, theta, low, low + span, step, wl.stream(seed, "lengths"))
    assert np.array_equal(found, again)


@pytest.mark.parametrize(("theta", "step"), [(0.4, 1), (0.4, 1024), (1.2, 256), (0.0, 512)])
def test_zipf_frequencies_follow_the_closed_form(theta: float, step: int) -> None:
    count = 200_000
    found = wl.zipf_lengths(count, theta, 1024, 4096, step, wl.stream(0, "lengths"))
    values = np.arange(1024, 4097, step)
    weights = np.arange(1, len(values) + 1, dtype=float) ** -theta
    expected = weights / weights.sum()
    assert np.allclose(wl.zipf_probabilities(len(values), theta), expected)
    # Cumulated, so that the bound (of Kolmogorov and Smirnov, at 1 in 10^6) fits any grid.
    observed = np.bincount((found - 1024) // step, minlength=len(values)) / count
    assert np.abs(np.cumsum(observed - expected)).max() < 2.7 / np.sqrt(count)


def test_uniform_lengths_and_exponential_gaps() -> None:
    found = wl.uniform_lengths(60_000, 1, 6, wl.stream(0, "lengths"))
    assert np.allclose(np.bincount(found)[1:] / 60_000, 1 / 6, atol=0.01)
    gaps = np.diff(wl.poisson_arrivals(100_000, 2.0, wl.stream(1, "arrivals")), prepend=0.0)
    share = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(share - (1 - np.exp(-2.0 * np.sort(gaps)))).max() < 0.01


@given(st.lists(st.integers(2, 100_000), min_size=1), st.floats(0.01, 1000))
def test_split_keeps_totals_and_ratio(totals: list[int], ratio: float) -> None:
    try:
        prompt, output = wl.split_lengths(totals, ratio)
    except wl.WorkloadError:
        assert min(totals) * ratio < ratio + 1, "some prompt would be empty"
        return
    assert (prompt + output == totals).all()
    assert min(prompt.min(), output.min()) >= 1
    # output = floor(total / (ratio + 1)), or 1
    exact = np.array(totals) / (ratio + 1)
    assert ((output <= np.maximum(exact, 1)) & (output > exact - 1)).all()


def test_split_of_the_paper_and_of_a_total_too_short() -> None:
    prompt, output = wl.split_lengths([1024, 4096], 10)
    assert (prompt.tolist(), output.tolist()) == ([931, 3724], [93, 372])
    with pytest.raises(wl.WorkloadError, match=r"1 tokens cannot be split .* at P:D 10"):
        wl.split_lengths([5, 1], 10)


@given(seeds)
def test_streams_are_independent_of_each_other(seed: int) -> None:
    first = wl.stream(seed, "lengths").random(4)
    wl.stream(seed, "another use").random(100)
    assert np.array_equal(first, wl.stream(seed, "lengths").random(4))
    assert not np.array_equal(first, wl.stream(seed, "arrivals").random(4))
    assert not np.array_equal(first, wl.stream(seed + 1, "lengths").random(4))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_rate_and_variation_asked_for(cv: float) -> None:
    arrivals = wl.gamma_arrivals(100_000, 4.0, cv, wl.stream(1, "arrivals"))
    gaps = np.diff(arrivals, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)
    assert (gaps >= 0).all()


@pytest.mark.parametrize("kind", ["poisson", "gamma"])
def test_a_scenarios_arrivals_follow_its_seed(kind: str) -> None:
    workload = {
        "requests": 40,
        "lengths": {"kind": "fixed", "prompt": 9, "decode": 2},
        "arrivals": {"kind": kind, "rate": 4.0, **({"cv": 2.0} if kind == "gamma" else {})},
    }

    def arrivals(seed: int) -> list[float]:
        scenario = Scenario.model_validate(SCENARIO | {"seed": seed, "workload": workload})
        requests = build_requests(scenario, 64, SOURCE)
        return [request.arrival_s for request in requests]

    assert arrivals(3) == arrivals(3)
    assert not set(arrivals(3)) & set(arrivals(4))


def test_what_requests_declare() -> None:
    """Equal lengths are one object, as of a million of them they would take much memory."""
    prompt, output = np.array([10, 90, 10]), np.array([5, 20, 95])
    requests = wl.make_requests(wl.at_once(3), prompt, output, max_length=100)
    assert [r.max_tokens for r in requests] == [90, 20, 95], "what fits, or what is needed"
    assert [r.id for r in requests] == [0, 1, 2]
    exact = wl.make_requests(wl.at_once(3), prompt, output, max_length=100, declare_exact=True)
    assert [r.max_tokens for r in exact] == [5, 20, 95]
    long = np.array([700, 900, 700])
    first, _, last = wl.make_requests(wl.at_once(3), long, long, max_length=1600)
    assert first.prompt_tokens is last.output_tokens
    assert first.max_tokens is last.max_tokens


# Traces --------------------------------------------------------------------------------------

ZEROS = "0" * 5000


HEAD = "arrival,prompt,decode\n"
GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n'
SHARE_GPT = '{"id": "a", "conversations": [{"from": "human", "value": "Hi"}]}'
BEFORE = {"rows": ("t.csv", HEAD), "lines": ("t.jsonl", GOOD)}
#: A file (of rows after a header, or of lines after a good one), and what is said of it.
REFUSED: list[tuple[str, str, str]] = [
    ("rows", "0,10,5\n1,nan,5\n", "row 3: prompt is 'nan': must be a whole number from 1 to"),
    ("rows", "0,10,5\n1,10,0\n", "row 3: decode is '0': must be a whole number from 1"),
    ("t.csv", "prompt,decode\n8,2\n9,0\n", "skip_empty=true"),
    (
        "t.csv",
        "prompt,decode,user\n5,6,7\n5,6,Ada\n",
        "row 3: user is 'Ada': must be a whole number",
    ),
    ("rows", "0,-10,5\n", "row 2: prompt is '-10'"),
    ("rows", "0,1e3,5\n", "row 2: prompt is '1e3'"),
    ("rows", "0,1.5,5\n", "row 2: prompt is '1.5'"),
    ("rows", "0,99999999999999999999,5\n", "row 2: prompt is '99999999999999999999'"),
    ("rows", "0,10,5\n1,10\n", "row 3 has 2 of 3 fields"),
    ("rows", "0,10,5\n1,10,5,6\n", "row 3 has 4 of 3 fields"),
    ("rows", "0,10,5\n\n1,10,5\n", "row 3 is empty"),
    ("rows", "0,10,5\nsoon,10,5\n", "row 3: arrival is 'soon': must be a number"),
    ("rows", "0,10,5\nnan,10,5\n", "row 3: arrival is 'nan': must be a number"),
    ("rows", "0,10,5\ninf,10,5\n", "row 3: arrival is 'inf': must be a number"),
    ("rows", '0,10,"5\n', "row 2 is not readable CSV"),
    ("rows", "-1e308,5,5\n1e308,5,5\n", "row 2: arrival is '-1e308'"),  # beyond any clock
    ("rows", "0,5,5\n1,5,\xff\n", "row 3 is not readable CSV: it is not UTF-8 text"),
    ("rows", f"0,{ZEROS}99999999,1\n", "must be a whole number from 1"),
    ("rows", f"0,{'9' * 5000},1\n", "must be a whole number from 1"),
    ("rows", f"0,{ZEROS},1\n", "row 2: prompt is "),
    ("rows", "", "expected a header and at least one request"),
    ("t.csv", "a,b\n1,2\n", "none of the columns prompt_tokens"),
    ("t.csv", "\xff\xfe\x00", "not readable CSV"),
    ("t.csv", "prompt,decode,user\n5,6,7\n5,6,\n", "row 3: user is '': must be a whole number fr"),
    ("t.jsonl", '{"prompt": 1, "decode": 2}\n{"prompt": 1}\n', "line 2: the key decode is missing"),
    ("t.jsonl", '{"prompt": 1, "decode": 2}\n[1]\n', "line 2: must be a JSON object, not [1]"),
    ("t.jsonl", '{"prompt": 1, "decode": true}\n', "line 1: decode is 'true': must be a whole"),
    ("t.jsonl", '{"prompt": 1, "decode": 2}\n{"pro', "line 2 is not readable JSON"),
    ("t.jsonl", "", "expected at least one request"),
    ("t.jsonl", '{"a": 1}\n', "none of the columns prompt_tokens"),
    ("t.json", '{"ttfts": []}', "expected a detailed result of vLLM's benchmark"),
    ("t.json", '{"input_lens": [1], "output_lens": [1, 2]}', "input_lens 1, output_lens 2"),
    ("t.json", '{"input_lens": [0], "output_lens": [1]}', "request 0: input_lens is '0'"),
    ("t.json", '{"input_lens": [5], "output_lens": [0]}', "request 0: output_lens is '0'"),
    ("t.json", "[" * 100_000, "is not readable JSON"),
    ("share.json", f"[{SHARE_GPT}]", "text without token counts"),
    ("share.jsonl", f"{SHARE_GPT}\n", "--save-detailed"),
    ("lines", GOOD.replace("5,", '"soon",'), "timestamp is 'soon': must be a number of at most"),
    ("lines", GOOD.replace("5,", "NaN,"), "timestamp is 'NaN': must be a number"),
    ("lines", GOOD.replace("5,", "1e300,"), "timestamp is '1000"),
    ("lines", GOOD.replace("600", "0"), "input_length is '0': must be a whole number from 1"),
    ("lines", GOOD.replace("600", "1e9"), "input_length is '1000000000': must be a whole number"),
    ("lines", GOOD.replace(" 9,", " null,"), "the key output_length is missing"),
    ("lines", GOOD.replace('"output_length": 9, ', ""), "the key output_length is missing"),
    ("lines", GOOD.replace("[1, 2]", "7"), "hash_ids is 7: must be a list of whole numbers"),
    ("lines", GOOD.replace("[1, 2]", "[1, 2.5]"), "hash_ids is [1, 2.5]: must be a list of whole"),
    ("lines", GOOD.replace("[1, 2]", "[1, 2, 3]"), "hash_ids has 3 blocks: must be 1 or 2, one"),
    ("lines", GOOD.replace("[1, 2]", "[]"), "hash_ids has 0 blocks: must be 1 or 2"),
    ("lines", GOOD.replace("600", "1024").replace("2]", "2, 3]"), "has 3 blocks: must be 2, "),
    ("lines", "[1]\n", "must be a JSON object, not [1]"),
    ("lines", f"\n{GOOD}", "line 2 is not readable JSON: Expecting value"),
    ("lines", GOOD[:40] + "\n", "not readable JSON: "),
    ("lines", GOOD.replace("9", "9\xff"), "not readable JSON: "),
    ("lines", "[" * 100_000 + "\n", "not readable JSON: maximum recursion depth exceeded"),
]


@pytest.mark.parametrize(("name", "text", "expected"), REFUSED, ids=lambda text: text[:30])
def test_a_trace_that_is_refused(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """In a line that names the file, and the row or line."""
    name, before = BEFORE.get(name, (name, ""))
    path = tmp_path / name
    path.write_text(before + text, encoding="latin-1")
    with pytest.raises(wl.WorkloadError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path)) and expected in str(caught.value)
    assert "line 2" in str(caught.value) or not before.startswith("{")
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(wl.WorkloadError, match=r"absent\.csv: No such file"):
        read_trace(tmp_path / "absent.csv")
    path = tmp_path / "trace.jsonl"
    with path.open("wb") as file:
        file.truncate(50_000_000)  # sparse
    with pytest.raises(wl.WorkloadError, match="line 1 is longer than 1048576 characters"):
        read_trace(path)


@given(st.sampled_from(sorted(BEFORE)), st.text(max_size=200))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, kind: str, text: str) -> None:
    name, before = BEFORE[kind]
    path = tmp_path_factory.getbasetemp() / f"fuzz_{name}"
    path.write_text(before + "0,1,1\n" * (kind == "rows") + text, encoding="utf-8", newline="")
    try:
        read_trace(path)
    except wl.WorkloadError as error:
        assert str(error).startswith(f"{path}: ")


ROWS = {
    ".csv": "arrival_s,prompt_tokens,output_tokens\n0,5,1\n2,7,3",
    ".jsonl": '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    '{"timestamp": 2000, "input_length": 7, "output_length": 3, "hash_ids": [2]}\n',
    ".json": '{"input_lens": [5, 7], "output_lens": [1, 3], "start_times": [1, 3]}',
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_packed_trace_is_the_same_trace(tmp_path: Path, kind: str) -> None:
    plain, packed = tmp_path / f"trace{kind}", tmp_path / f"trace{kind}.gz"
    plain.write_text(ROWS[kind])
    packed.write_bytes(gzip.compress(ROWS[kind].encode()))
    traces = [read_trace(plain), read_trace(packed)]
    for trace in traces:
        assert trace.arrival_s is not None and trace.arrival_s.tolist() == [0, 2]
        assert (trace.prompt.tolist(), trace.output.tolist()) == ([5, 7], [1, 3])
    assert is_trace(str(packed))
    good = gzip.compress(ROWS[".csv"].encode() * 50)
    for damaged in (good[:-9], b"not packed", good[:15] + b"xxx" + good[18:]):
        (tmp_path / "trace.csv.gz").write_bytes(damaged)
        with pytest.raises(wl.WorkloadError, match=r"trace\.csv\.gz: "):
            read_trace(tmp_path / "trace.csv.gz")


def test_the_memory_of_a_packed_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30,000 rows of a few bytes: packed they are a thousandth, and need as much memory."""
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b"prompt_tokens,output_tokens\n" + b"5,1\n" * 30_000))
    assert len(read_trace(path)) == 30_000
    monkeypatch.setattr("sarathi_sim.simulator.load.trace.available_bytes", lambda: 1_000_000)
    with pytest.raises(wl.WorkloadError, match=r"trace\.csv\.gz: about \d+ rows would take"):
        read_trace(path)


def test_limit_and_leading_zeros(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"prompt,decode\n1,2\n{ZEROS}3,4\n5,6\nbad,7\n")
    assert read_trace(path, limit=2).prompt.tolist() == [1, 3]


SECOND = 1_715_299_200  # 2024-05-10, in seconds since 1970


@pytest.mark.parametrize(
    ("name", "text", "arrival"),
    [
        ("t.csv", "arrival,prompt,decode\n5,374,44\n7.5,396,109\n", [0, 2.5]),
        ("t.csv", "prompt_tokens,output_tokens\n374,44\n396,109\n", None),
        ("t.csv", "num_prefill_tokens,num_decode_tokens,x\n374,44,8.5\n396,109,3.6\n", None),
        ("t.csv", "input_toks,output_toks,arrival_time_ns\n374,44,0\n396,109,2500000000", [0, 2.5]),
        (  # Azure 2023: the published file has no last line end
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
            "2023-11-16 18:15:49.1805900,396,109",
            [0, 2.5],
        ),
        ("t.csv", "arrival_s,input_tokens,output_length\n7.5,396,109\n5,374,44\n", [0, 2.5]),
        (  # Azure 2024
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,374,44\n"
            "2024-05-10 00:00:02.509930+00:00,396,109\n",
            [0, 2.5],
        ),
        (  # BurstGPT
            "t.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,374,44,418,Conversation log\n7.5,GPT-4,396,109,505,API log\n",
            [0, 2.5],
        ),
        ("t.csv", f"timestamp,prompt,decode\n{SECOND}000,374,44\n{SECOND}500,396,109", [0, 0.5]),
        ("t.csv", "arrival_time_ms,prompt,decode\n0,374,44\n2500,396,109\n", [0, 2.5]),
        (
            "t.jsonl",
            '{"arrival_time": "2024-05-10T00:00:00Z", "prompt_tokens": 374, '
            '"completion_tokens": 44}\n{"arrival_time": "2024-05-10T00:00:02.5Z", '
            '"prompt_tokens": 396, "completion_tokens": 109.0}\n',
            [0, 2.5],
        ),
        (  # AIPerf's profile_export.jsonl
            "t.jsonl",
            "".join(
                f'{{"metadata": {{"request_start_ns": {SECOND}{ns:09d}}}, "metrics": '
                f'{{"input_sequence_length": {{"value": {prompt}, "unit": "tokens"}}, '
                f'"output_sequence_length": {{"value": {output}, "unit": "tokens"}}}}}}\n'
                for ns, prompt, output in ((0, 374, 44), (500_000_000, 396, 109))
            ),
            [0, 0.5],
        ),
        (  # vLLM's bench serve --save-result --save-detailed
            "t.json",
            '{"backend": "vllm", "input_lens": [374, 396], "output_lens": [44, 109], '
            '"start_times": [900.5, 903.0], "ttfts": [0.1, 0.1]}',
            [0, 2.5],
        ),
        ("t.json", '{"input_lens": [374, 396], "output_lens": [44, 109]}', None),
    ],
)
def test_forms_of_tools_and_logs(
    tmp_path: Path, name: str, text: str, arrival: list[float] | None
) -> None:
    """Rows that are not in order are put in order; times are seconds, dates or since 1970."""
    (tmp_path / name).write_text(text)
    trace = read_trace(tmp_path / name)
    assert trace.prompt.tolist() == [374, 396]
    assert trace.output.tolist() == [44, 109]
    found = None if trace.arrival_s is None else trace.arrival_s.tolist()
    assert found == (None if arrival is None else pytest.approx(arrival, abs=1e-6))


@needs_datasets
def test_the_azure_trace_loads_as_it_is() -> None:
    trace = read_trace(public_datasets() / "traces" / "AzureLLMInferenceTrace_conv_2023.csv")
    assert (len(trace), trace.prompt[0], trace.output[0]) == (19366, 374, 44)
    assert trace.arrival_s is not None and trace.arrival_s[0] == 0
    assert trace.arrival_s[-1] == pytest.approx(3501.721937)


def test_a_trace_may_name_users(tmp_path: Path) -> None:
    """A column ``user`` beside any of the formats; without one all requests are user 0's."""
    (tmp_path / "trace.csv").write_text("prompt,decode,user\n374,44,7\n396,109,0\n")
    trace = read_trace(tmp_path / "trace.csv")
    columns = wl.at_once(2), trace.prompt, trace.output
    for user, found in ((trace.user, [7, 0]), (None, [0, 0])):
        requests = wl.make_requests(*columns, max_length=1000, user=user)
        assert [request.user for request in requests] == found


def lines(*rows: Mapping[str, Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def shared(trace: Trace) -> float:
    """The share of the prompt tokens that earlier prompts begin with."""
    arrays = (wl.at_once(len(trace)) if trace.arrival_s is None else trace.arrival_s, trace.prompt)
    requests = wl.make_requests(*arrays, trace.output, max_length=1, prefix=trace.prefix)
    return shared_tokens(requests) / int(trace.prompt.sum())


@pytest.mark.parametrize("empty", [None, "", "  ", "null", "None", "NaN", float("nan")])
def test_an_empty_value_names_no_conversation(tmp_path: Path, empty: object) -> None:
    path, sizes = tmp_path / "t.jsonl", (800, 900, 1000)
    rows = [{"prompt": n, "decode": 50, "session_id": empty, "turn": empty} for n in sizes]
    path.write_text(lines(*rows, {"prompt": 1100, "decode": 50}, {**rows[0], "session_id": "a"}))
    assert shared(read_trace(path)) == 0
    path = tmp_path / "t.csv"
    path.write_text("prompt,decode,session_id\n" + "".join(f"{n},50,{empty}\n" for n in sizes))
    assert shared(read_trace(path)) == 0


MOONCAKE = [
    {"timestamp": 3000 * n, "input_length": 1300, "output_length": 40, "hash_ids": [0, 1, 10 + n]}
    for n in range(3)
]


@pytest.mark.parametrize("left_out", [(), ("hash_ids",), ("hash_ids", 0)])
@pytest.mark.parametrize("columns", [{}, {"user": "tenant"}, {"prompt": "input_length"}])
def test_mooncakes_form_is_known_by_its_keys(
    tmp_path: Path, left_out: tuple[Any, ...], columns: dict[str, str]
) -> None:
    """Times are in ms, with and without blocks, whichever columns are named; blocks are of 512
    tokens, and 0 and 1 are used again twice: 2,048 of 3,900 tokens."""
    rows: list[dict[str, Any]] = [{**row, "tenant": n % 2} for n, row in enumerate(MOONCAKE)]
    for row in rows[-1:] if len(left_out) == 2 else rows:
        for key in left_out[:1]:
            del row[key]
    (tmp_path / "t.jsonl").write_text(lines(*rows))
    trace = read_trace(tmp_path / "t.jsonl", None, Reading(columns))
    assert trace.arrival_s is not None and trace.arrival_s.tolist() == [0, 3, 6]
    assert shared(trace) == {0: 2048, 1: 0, 2: 1024}[len(left_out)] / 3900
    assert (trace.user is not None) == ("user" in columns)
    assert ("columns not used: tenant" in trace.notes) == ("user" not in columns)


def test_blocks_of_another_size_are_found_from_the_lengths(tmp_path: Path) -> None:
    """Alibaba's form: 160 tokens in 10 blocks, 224 in 14, 288 in 18; two of them begin with the
    160 tokens of the first, so 320 of 672 are shared. Its times are seconds."""
    path, first = tmp_path / "t.jsonl", list(range(10))
    rows: list[dict[str, Any]] = [
        {"timestamp": 30.5 * n, "input_length": 160 + 64 * n, "output_length": 20}
        | {"hash_ids": first + [100 * n + k for k in range(4 * n)]}
        for n in range(3)
    ]
    path.write_text(lines(*({"chat_id": n, **row} for n, row in enumerate(rows))))
    trace = read_trace(path)
    assert trace.arrival_s is not None and trace.arrival_s.tolist() == [0, 30.5, 61]
    assert shared(trace) == 320 / 672
    path.write_text(lines(*rows))  # without a chat: neither the unit nor the size is known
    trace = read_trace(path)
    assert (trace.arrival_s, trace.unit_of, shared(trace)) == (None, "timestamp", 320 / 672)
    assert "each number of hash_ids stands for 16 tokens" in trace.notes
    path.write_text(lines(rows[0]))
    with pytest.raises(wl.WorkloadError, match=r"line 1: .* \(here 15 to 17 tokens\)"):
        read_trace(path)
    assert shared(read_trace(path, None, Reading(block_tokens=16))) == 0
    path.write_text(lines(*rows, {**rows[0], "hash_ids": [1, 2]}))
    with pytest.raises(wl.WorkloadError, match=r"line 1: .* set by workload.lengths.block_tokens"):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "first", "seconds", "said"),
    [
        ("arrival_time_ms", 0, 1e-3, ""),
        ("metadata.request_start_ns", 0, 1e-9, ""),
        ("arrived_at", 0, 1.0, ""),
        ("timestamp", SECOND, 1.0, "timestamp is taken for s since 1970, by its size"),
        ("timestamp", 1000 * SECOND, 1e-3, "timestamp is taken for ms since 1970, by its size"),
        ("timestamp", 0, None, ""),
        ("time", 3000, None, ""),
        ("arrival_time", 0, None, ""),
    ],
)
def test_a_unit_is_known_or_asked_for(
    tmp_path: Path, header: str, first: int, seconds: float | None, said: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{header},prompt,decode\n{first},5,6\n{first + 2000},7,8\n")
    trace = read_trace(path)
    if seconds is None:
        assert (trace.arrival_s, trace.unit_of) == (None, header)
        problem = f"workload.lengths.time_unit: the unit of the column {header} is not known"
        assert problem in refused("workload", path)
        trace = read_trace(path, None, Reading(time_unit="ms"))
        seconds = 1e-3
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == pytest.approx([0, 2000 * seconds], abs=1e-6)
    assert [note for note in trace.notes if "1970" in note] == ([said] if said else [])


def test_columns_that_are_not_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,prompt,b,decode,arrival,arrival_s,c,d,e,f\n1,5,2,6,1,0,3,4,5,6\n")
    assert read_trace(path).notes == ("columns not used: a, b, arrival, c, d, e and 1 more",)
    assert "not used: a, b, arrival" in called("workload", path).output
    path = tmp_path / "t.json"
    path.write_text('{"input_lens": [5], "output_lens": [6], "ttfts": [0.1], "duration": 9}')
    assert read_trace(path).notes == ("columns not used: ttfts",)


def a_record(n: int, **changes: Any) -> dict[str, Any]:
    """A request in AIPerf's ``profile_export.jsonl``."""
    tokens = {"input_sequence_length": {"value": 500 + n}, "output_sequence_length": {"value": 40}}
    phase = {"benchmark_phase": "profiling", "was_cancelled": False}
    whole = {"metadata": {"request_start_ns": 10**9 * n, **phase}, "metrics": tokens, "error": None}
    return whole | changes


@pytest.mark.parametrize("failed", [0, 1])
def test_a_record_of_a_failed_request_is_skipped_or_named(tmp_path: Path, failed: int) -> None:
    path, rows = tmp_path / "profile_export.jsonl", [a_record(n) for n in range(3)]
    rows[failed] |= {"metrics": {"error_isl": {"value": 501}}, "error": {"code": 499}}
    rows[failed]["metadata"]["was_cancelled"] = True
    path.write_text(lines(*rows))
    with pytest.raises(wl.WorkloadError, match=rf"line {failed + 1}: .*skip_empty=true"):
        read_trace(path)
    trace = read_trace(path, None, Reading(skip_empty=True))
    assert (len(trace), trace.left_out, trace.prompt.min()) == (2, 1, 501 if not failed else 500)
    rows[failed]["metadata"]["benchmark_phase"] = "warmup"
    path.write_text(lines(*rows))
    trace = read_trace(path)
    assert (len(trace), trace.left_out) == (2, 0)
    assert "1 requests of the warm-up left out" in trace.notes


def test_columns_with_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("in,out,ms\n8,0,0\n30,3,1000\n20,2,500\n")
    columns = {"prompt": "in", "output": "out", "arrival": "ms"}
    trace = read_trace(path, None, Reading(columns, time_unit="ms", skip_empty=True))
    assert trace.prompt.tolist() == [20, 30]
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0, 0.5]
    with pytest.raises(wl.WorkloadError, match="row 2: out is '0': must be a whole number from 1"):
        read_trace(path, None, Reading(columns, time_unit="ms"))
    with pytest.raises(
        wl.WorkloadError, match=r"no column no \(prompt\); the file has in, out, ms"
    ):
        read_trace(path, None, Reading({"prompt": "no"}))
    path.write_text("prompt,decode\n0,1\n")
    with pytest.raises(wl.WorkloadError, match="no request has both"):
        read_trace(path, None, Reading(skip_empty=True))


def test_turns_of_a_session_share_what_came_before(tmp_path: Path) -> None:
    """Turn 2 begins with turn 1's 20 + 13 tokens, of which the last is never in the cache."""
    path = tmp_path / "trace.csv"
    rows = ["a,0,1,20,13", "b,0,1,50,5", "a,9,2,53,13", ",9,1,60,1", "a,9,3,86,2"]
    path.write_text("session_id,arrival,turn,prompt,decode\n" + "\n".join(rows))
    trace = read_trace(path)
    assert trace.session is not None
    assert trace.prompt.tolist() == [20, 50, 60, 53, 86]  # at 9 s by turn
    requests = wl.make_requests(
        wl.at_once(5), trace.prompt, trace.output, max_length=200, prefix=trace.prefix
    )
    assert [request.prefix[0][1] for request in requests] == [32, 54, 60, 65, 87]
    assert shared_tokens(requests) == 32 + 64
    picked = trace.sampled(0.3, np.random.default_rng(4))
    assert picked.session is not None
    kept = set(picked.session.tolist())
    assert len(picked) == sum(session in kept for session in trace.session.tolist()) < 5
    short = trace.clipped(40, 5)
    assert short.prefix is not None
    assert short.prompt.max() == 40
    assert [prefix[0][1] for prefix in short.prefix] == [24, 44, 40, 44, 41]


def a_trace(count: int, seed: int = 1) -> Trace:
    """Requests that are told apart by their prompts, each with a gap of its own before it."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.integers(1, 50, count)).astype(float)
    prefix = [((n % 3, 8),) for n in range(count)]
    return Trace(100 + np.arange(count), 1 + np.arange(count), arrival_s, prefix=prefix)


def test_a_sample_holds_about_its_share_and_at_least_one() -> None:
    few, one = (a_trace(4000).sampled(share, wl.stream(3, "sample")) for share in (0.1, 1e-9))
    assert 320 < len(few) < 480 and len(one) == 1
    assert few.arrival_s is not None and few.arrival_s[0] == 0


@pytest.mark.parametrize(("size", "block"), [(60, 7), (60, 60), (60, 1), (61, 100)])
def test_a_resampled_trace_has_every_request_equally_often(size: int, block: int) -> None:
    trace, rounds = a_trace(size), 4
    found = trace.resampled(rounds * size, block, np.random.default_rng(5))
    drawn = (found.prompt - 100).tolist()
    for turn in range(rounds):
        assert sorted(drawn[turn * size : (turn + 1) * size]) == list(range(size))
    assert (found.output == found.prompt - 99).all()
    # Blocks stay whole: within one, the next request is the next of the trace.
    for earlier, later in pairwise(drawn):
        assert later == earlier + 1 or (
            later % block == 0 and (earlier + 1) % block in (0, size % block)
        )
    if block < size:
        assert drawn != sorted(drawn[:size]) * rounds


def test_a_resampled_trace_keeps_each_requests_gap() -> None:
    """The gap before a request is the one before it in the trace (the first's is their mean), so
    whole rounds last as long as the trace, and a mean gap more, each."""
    size = 60
    trace = a_trace(size)
    assert trace.arrival_s is not None
    own = np.diff(trace.arrival_s)
    own = np.concatenate([[own.mean()], own])
    found = trace.resampled(3 * size + 10, 7, np.random.default_rng(5))
    assert found.arrival_s is not None and found.arrival_s[0] == 0
    gaps = np.diff(found.arrival_s)
    assert gaps == pytest.approx(own[found.prompt - 100][1:])
    whole = trace.resampled(3 * size, 7, np.random.default_rng(5)).arrival_s
    assert whole is not None
    first = own[found.prompt[0] - 100]
    assert whole[-1] == pytest.approx(3 * own.sum() - first)


def test_a_resampled_trace_follows_its_seed_and_rounds_share_nothing() -> None:
    trace = a_trace(60)
    found, again, other = (
        trace.resampled(200, 7, np.random.default_rng(seed)) for seed in (5, 5, 6)
    )
    assert found.prompt.tolist() == again.prompt.tolist() != other.prompt.tolist()
    assert found.prefix == again.prefix and found.prefix is not None
    names = [{name for each in found.prefix[n : n + 60] for name, _ in each} for n in (0, 60, 120)]
    assert [len(each) for each in names] == [3, 3, 3]
    assert not (names[0] & names[1] or names[1] & names[2] or names[0] & names[2])
    prompts = found.prompt[:60] - 100
    of_first = [each[0][0] for each in found.prefix[:60]]  # who shared in the trace still shares
    classes = {int(prompt) % 3: name for prompt, name in zip(prompts, of_first, strict=True)}
    assert [classes[int(prompt) % 3] for prompt in prompts] == of_first
    sessions = Trace(trace.prompt, trace.output, None, session=np.arange(60) // 2)
    numbers = sessions.resampled(120, 60, np.random.default_rng(5)).session
    assert numbers is not None and not set(numbers[:60]) & set(numbers[60:])


def test_a_resampled_workload_may_be_longer_than_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt,decode\n" + "".join(f"{n},{100 + n},5\n" for n in range(20)))
    lengths = {"kind": "trace", "path": str(path), "resample": 4}
    workload = {"requests": 50, "lengths": lengths, "arrivals": {"kind": "trace"}}
    drawn = []
    for seed in (0, 0, 1):
        scenario = Scenario.model_validate(SCENARIO | {"workload": workload, "seed": seed})
        requests = build_requests(scenario, 1000, SOURCE)
        drawn.append([(request.prompt_tokens, request.arrival_s) for request in requests])
    assert drawn[0] == drawn[1] != drawn[2]
    assert [when for _, when in drawn[0]] == list(range(50))
    assert sorted(prompt for prompt, _ in drawn[0][:20]) == list(range(100, 120))


def test_a_workload_draws_scales_and_clips_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,decode\n" + "".join(f"{i},{100 + i},9\n" for i in range(50)))

    def requests(**changes: Any) -> list[Request]:
        lengths = {"kind": "trace", "path": str(path), **changes.pop("lengths", {})}
        arrivals = {"kind": "trace", **changes.pop("arrivals", {})}
        scenario = SCENARIO | {"workload": {"lengths": lengths, "arrivals": arrivals, **changes}}
        return build_requests(Scenario.model_validate(scenario), 1000, SOURCE)

    assert [r.arrival_s for r in requests(arrivals={"scale": 2.0}, requests=3)] == [0, 0.5, 1]
    assert max(r.prompt_tokens for r in requests(lengths={"clip": {"prompt": 120}})) == 120
    some = requests(lengths={"sample": 0.5}, requests=10)
    assert len(some) == 10
    assert some[-1].prompt_tokens > 109, "drawn from all of the trace"
    assert some == requests(lengths={"sample": 0.5}, requests=10)


@pytest.mark.parametrize(
    ("points", "repeat", "counts"),
    [
        ([(0, 2), (100, 2)], False, [200, 200, 200, 200]),
        ([(0, 0), (200, 4)], False, [100, 300, 400, 400]),  # a ramp, then its end
        ([(0, 1), (50, 1), (50, 3), (100, 3)], True, [200, 200, 200, 200]),  # bursts
        ([(100, 1), (100, 5)], False, [100, 500, 500, 500]),
    ],
)
def test_a_varying_rate_has_its_integral(
    points: list[tuple[float, float]], repeat: bool, counts: list[int]
) -> None:
    """Arrivals in each 100 s within 5 standard deviations of the rate's integral."""
    at_s, rate = np.array(points, float).T
    arrival_s = wl.varying_arrivals(3000, at_s, rate, repeat, wl.stream(5, "arrivals"))
    assert (np.diff(arrival_s) >= 0).all()
    found = np.histogram(arrival_s, np.arange(5) * 100.0)[0]
    assert np.abs(found - counts).max() < 5 * np.sqrt(max(counts))
    if repeat:  # three quarters of a period's arrivals fall in its second half
        assert np.mean(arrival_s % 100 > 50) == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    ("rates", "repeat", "message"),
    [
        (((5, 1), (0, 1)), False, "workload.arrivals.rates: .*at_s must not fall"),
        (((0, 1), (9, 0)), False, "must not end with rate 0"),
        (((0, 1),), True, "must not be 0 all the time"),
    ],
)
def test_rates_that_make_no_sense_are_refused(rates: Any, repeat: bool, message: str) -> None:
    points = [{"at_s": at, "rate": rate} for at, rate in rates]
    arrivals = {"kind": "varying", "rates": points, "repeat": repeat}
    lengths = {"kind": "fixed", "prompt": 8, "decode": 8}
    workload = {"requests": 3, "lengths": lengths, "arrivals": arrivals}
    scenario = Scenario.model_validate(SCENARIO | {"workload": workload})
    with pytest.raises(UserError, match=message):
        build_requests(scenario, 1000, SOURCE)


def test_a_workload_in_numbers() -> None:
    arrival_s = np.array([0.0, 10, 20, 130])
    requests = wl.make_requests(
        arrival_s, np.array([10, 20, 30, 40]), np.array([5, 5, 5, 5]), max_length=100
    )
    found = describe_workload(requests)
    assert found["prompt_tokens"] == {
        "mean": 25, "p50": 25, "p90": 37, "p99": pytest.approx(39.7), "max": 40, "sum": 100,
    }  # fmt: skip
    assert found["rate"] == pytest.approx(3 / 130)
    assert found["peak_rate"] == 3 / 60 == peak_rate(arrival_s)
    assert found["gap_cv"] == pytest.approx(np.std([10, 10, 110]) / np.mean([10, 10, 110]))
    assert (found["pd_ratio"], found["shared"], found["users"]) == (5, 0, 1)
    none = describe_workload(wl.make_requests(wl.at_once(1), *np.ones((2, 1), int), max_length=9))
    assert none["rate"] is none["gap_cv"] is none["peak_rate"] is none["clients"] is None


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("tokens_in,decode,arrival\n30,3,1\n20,2,0\n25,9,4\n")
    words = ("workload", tmp_path / "log.csv", "--out", tmp_path / "out", "--json")
    done = called(*words, "--column", "prompt=tokens_in")
    assert json.loads(done.stdout)["workloads"]["log"]["prompt_tokens"]["mean"] == 25
    said = "log: 3 requests, 0.5 requests/s, 25 prompt and 5 output tokens on average."
    assert said in done.stderr and " 5.36 " in done.stderr
    assert (tmp_path / "out" / "figures" / "log.png").stat().st_size > 10_000
    assert "name the one with the prompt tokens in lengths.columns.prompt" in refused(*words)
    assert "--column size=4: must be arrival or" in refused(*words, "--column", "size=4")
    assert "prompt tokens shared (%)" in called("workload", "shared_prefixes").stdout


def test_a_closed_loop_does_not_arrive_at_once() -> None:
    arrivals = "workload.arrivals={kind: closed_loop, clients: 8}"
    alone = ("--set", arrivals, "--set", "workload.sessions=null")
    done = called("workload", "shared_prefixes", "--json", *alone)
    found = json.loads(done.stdout)["workloads"].values()
    assert {one["clients"] for one in found} == {8}
    assert "closed loop of 8 clients: each sends its next request after its answer" in done.stderr
