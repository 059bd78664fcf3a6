"""Lengths, arrivals and traces: distributions as stated, seeded streams, errors by file and row."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.config.loading import Source
from experiments.config.requests import build_requests
from experiments.config.scenario import Scenario
from simulator.load.trace import read_trace
from simulator.load.workload import (
    WorkloadError,
    at_once,
    gamma_arrivals,
    make_requests,
    poisson_arrivals,
    split_lengths,
    stream,
    uniform_lengths,
    zipf_lengths,
    zipf_probabilities,
)

seeds = st.integers(0, 2**63 - 1)
lengths = st.integers(1, 5000)


@given(seeds, st.floats(0, 3), lengths, st.integers(0, 5000), st.integers(1, 2000))
def test_zipf_stays_on_its_grid(seed: int, theta: float, low: int, span: int, step: int) -> None:
    found = zipf_lengths(50, theta, low, low + span, step, stream(seed, "lengths"))
    assert found.min() >= low
    assert found.max() <= low + span
    assert not ((found - low) % step).any()
    again = zipf_lengths(50, theta, low, low + span, step, stream(seed, "lengths"))
    assert np.array_equal(found, again)


@pytest.mark.parametrize(("theta", "step"), [(0.4, 1), (0.4, 1024), (1.2, 256), (0.0, 512)])
def test_zipf_frequencies_follow_the_closed_form(theta: float, step: int) -> None:
    count = 200_000
    found = zipf_lengths(count, theta, 1024, 4096, step, stream(0, "lengths"))
    values = np.arange(1024, 4097, step)
    weights = np.arange(1, len(values) + 1, dtype=float) ** -theta
    expected = weights / weights.sum()
    assert np.allclose(zipf_probabilities(len(values), theta), expected)
    # Cumulated, so that the bound (of Kolmogorov and Smirnov, at 1 in 10^6) fits any grid.
    observed = np.bincount((found - 1024) // step, minlength=len(values)) / count
    assert np.abs(np.cumsum(observed - expected)).max() < 2.7 / np.sqrt(count)


@given(seeds, lengths, st.integers(0, 5000))
def test_uniform_bounds(seed: int, low: int, span: int) -> None:
    found = uniform_lengths(50, low, low + span, stream(seed, "lengths"))
    assert low <= found.min() <= found.max() <= low + span


def test_uniform_reaches_both_ends_evenly() -> None:
    found = uniform_lengths(60_000, 1, 6, stream(0, "lengths"))
    assert np.allclose(np.bincount(found)[1:] / 60_000, 1 / 6, atol=0.01)


@given(st.lists(st.integers(2, 100_000), min_size=1), st.floats(0.01, 1000))
def test_split_keeps_totals_and_ratio(totals: list[int], ratio: float) -> None:
    try:
        prompt, output = split_lengths(totals, ratio)
    except WorkloadError:
        assert min(totals) * ratio < ratio + 1, "some prompt would be empty"
        return
    assert (prompt + output == totals).all()
    assert min(prompt.min(), output.min()) >= 1
    # output = floor(total / (ratio + 1)), or 1
    exact = np.array(totals) / (ratio + 1)
    assert ((output <= np.maximum(exact, 1)) & (output > exact - 1)).all()


def test_split_of_the_paper() -> None:
    prompt, output = split_lengths([1024, 4096], 10)
    assert prompt.tolist() == [931, 3724]
    assert output.tolist() == [93, 372]


def test_a_total_too_short_to_split() -> None:
    with pytest.raises(WorkloadError, match=r"1 tokens cannot be split .* at P:D 10"):
        split_lengths([5, 1], 10)


@given(seeds)
def test_streams_are_independent_of_each_other(seed: int) -> None:
    first = stream(seed, "lengths").random(4)
    stream(seed, "another use").random(100)
    assert np.array_equal(first, stream(seed, "lengths").random(4))
    assert not np.array_equal(first, stream(seed, "arrivals").random(4))
    assert not np.array_equal(first, stream(seed + 1, "lengths").random(4))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_rate_and_variation_asked_for(cv: float) -> None:
    arrivals = gamma_arrivals(100_000, 4.0, cv, stream(1, "arrivals"))
    gaps = np.diff(arrivals, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)
    assert (gaps >= 0).all()


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(poisson_arrivals(100_000, 2.0, stream(1, "arrivals")), prepend=0.0)
    share = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(share - (1 - np.exp(-2.0 * np.sort(gaps)))).max() < 0.01


@pytest.mark.parametrize("kind", ["poisson", "gamma"])
def test_a_scenarios_arrivals_follow_its_seed(kind: str) -> None:
    workload = {
        "requests": 40,
        "lengths": {"kind": "fixed", "prompt": 9, "decode": 2},
        "arrivals": {"kind": kind, "rate": 4.0, **({"cv": 2.0} if kind == "gamma" else {})},
    }

    def arrivals(seed: int) -> list[float]:
        tree = {"seed": seed, "model": "m", "device": "d", "policy": {"name": "orca"}}
        scenario = Scenario.model_validate(tree | {"workload": workload})
        requests = build_requests(scenario, 64, Source("here.yaml", "one", {}, ()))
        return [request.arrival_s for request in requests]

    assert arrivals(3) == arrivals(3)
    assert not set(arrivals(3)) & set(arrivals(4))


def test_what_requests_declare() -> None:
    prompt, output = np.array([10, 90, 10]), np.array([5, 20, 95])
    requests = make_requests(at_once(3), prompt, output, max_length=100)
    assert [r.max_tokens for r in requests] == [90, 20, 95], "what fits, or what is needed"
    assert [r.id for r in requests] == [0, 1, 2]
    exact = make_requests(at_once(3), prompt, output, max_length=100, declare_exact=True)
    assert [r.max_tokens for r in exact] == [5, 20, 95]


# Traces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arrival"),
    [
        ("arrival,prompt,decode\n5,374,44\n7.5,396,109\n", [0, 2.5]),
        ("prompt_tokens,output_tokens\n374,44\n396,109\n", None),
        ("num_prefill_tokens,num_decode_tokens,pd_ratio\n374,44,8.5\n396,109,3.6\n", None),
        ("input_toks,output_toks,arrival_time_ns\n374,44,0\n396,109,2500000000\n", [0, 2.5]),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
            "2023-11-16 18:15:49.1805900,396,109",  # the published file has no last line end
            [0, 2.5],
        ),
    ],
)
def test_trace_formats(tmp_path: Path, text: str, arrival: list[float] | None) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    trace = read_trace(path)
    assert trace.prompt.tolist() == [374, 396]
    assert trace.output.tolist() == [44, 109]
    if arrival is None:
        assert trace.arrival_s is None
    else:
        assert trace.arrival_s is not None
        assert trace.arrival_s.tolist() == pytest.approx(arrival)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("0,10,5\n1,nan,5\n", "row 3: prompt is 'nan': must be a whole number from 1 to 16777216"),
        ("0,10,5\n1,10,0\n", "row 3: decode is '0': must be a whole number from 1"),
        ("0,-10,5\n", "row 2: prompt is '-10'"),
        ("0,1e3,5\n", "row 2: prompt is '1e3'"),
        ("0,1.5,5\n", "row 2: prompt is '1.5'"),
        ("0,99999999999999999999,5\n", "row 2: prompt is '99999999999999999999'"),
        ("0,10,5\n1,10\n", "row 3 has 2 of 3 fields"),
        ("0,10,5\n1,10,5,6\n", "row 3 has 4 of 3 fields"),
        ("0,10,5\n\n1,10,5\n", "row 3 is empty"),
        ("0,10,5\nsoon,10,5\n", "row 3: arrival is 'soon': must be a number"),
        ("0,10,5\nnan,10,5\n", "row 3: arrival is 'nan': must be a number"),
        ("0,10,5\ninf,10,5\n", "row 3: arrival is 'inf': must be a number"),
        ("1,10,5\n0,10,5\n", "row 3: arrival is earlier than in the row before"),
        ('0,10,"5\n', "row 2 is not readable CSV"),
        ("", "expected a header and at least one request"),
    ],
)
def test_trace_errors_name_file_and_row(tmp_path: Path, rows: str, expected: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,decode\n" + rows)
    with pytest.raises(WorkloadError) as caught:
        read_trace(path)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_trace_without_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(WorkloadError, match=r"none of the columns prompt_tokens.*has a, b"):
        read_trace(path)
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not readable CSV"):
        read_trace(path)


@given(st.text(max_size=200))
def test_no_text_breaks_the_trace_reader(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    path.write_text("arrival,prompt,decode\n0,1,1\n" + text, encoding="utf-8", newline="")
    try:
        read_trace(path)
    except WorkloadError as error:
        assert str(path) in str(error)


def test_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt,decode\n1,2\n3,4\n5,6\nbad,7\n")
    assert read_trace(path, limit=2).prompt.tolist() == [1, 3]


def test_the_azure_trace_loads_as_it_is() -> None:
    folder = os.environ.get("SARATHI_SIM_DATASETS")
    if not folder:
        pytest.skip("SARATHI_SIM_DATASETS does not name the public measurements")
    trace = read_trace(Path(folder) / "traces" / "AzureLLMInferenceTrace_conv_2023.csv")
    assert len(trace.prompt) == 19366
    assert trace.arrival_s is not None
    assert trace.arrival_s[0] == 0
    assert trace.arrival_s[-1] == pytest.approx(3501.721937)
    assert (trace.prompt[0], trace.output[0]) == (374, 44)


def test_a_trace_may_name_users(tmp_path: Path) -> None:
    """A column ``user`` beside any of the formats; requests carry it, without one they are 0's."""
    path = tmp_path / "trace.csv"
    path.write_text("prompt,decode,user\n374,44,7\n396,109,0\n")
    trace = read_trace(path)
    assert trace.user is not None
    assert trace.user.tolist() == [7, 0]
    columns = at_once(2), trace.prompt, trace.output
    for user, found in ((trace.user, [7, 0]), (None, [0, 0])):
        requests = make_requests(*columns, max_length=1000, user=user)
        assert [request.user for request in requests] == found
    path.write_text("prompt,decode,user\n374,44,7\n396,109,Ada\n")
    with pytest.raises(WorkloadError, match="row 3: user is 'Ada': must be a whole number from 0"):
        read_trace(path)
