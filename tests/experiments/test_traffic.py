"""Lengths in a word: the same requests in every command, and random lengths of two tools."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import sarathi_sim as sim
from sarathi_sim.experiments.capacity import answer
from sarathi_sim.experiments.capacity.options import deployable
from sarathi_sim.experiments.config.loading import check_scenario, read_draft
from sarathi_sim.experiments.config.requests import build_requests
from sarathi_sim.experiments.run.traffic import (
    FORMS,
    demand_of,
    parse_workload,
    rates_of,
    requests_of,
    with_workload,
)
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.requests import lengths_line
from tests.experiments.small_config import HERE, called, refused
from tests.experiments.small_laboratory import question, recommendation

CONFIG: dict[str, Any] = yaml.safe_load("""
name: x
model: llama-13b
device: a6000
workload:
  requests: 300
  lengths: {kind: uniform, min: 64, max: 128}
  pd_ratio: 3
  sessions: {max_turns: 3, think_s: 1.0}
  arrivals: {kind: gamma, rate: 1, cv: 0.5}
cluster: {max_length: 2048}
policy: {name: sarathi, chunk_size: 256}
batching: {max_batch: 8}
capacity: {slo: p90 ttft 2s, requests: 200}
""")
WORDS = ["1024:256", "1024:256~0.5", "1K@14", "1K@5..50", "1K@?"]


def drawn(workload: dict[str, Any], requests: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    given = {**workload, "requests": requests}
    rest = {"model": "any", "device": "any", "policy": {"name": "orca"}}
    scenario = check_scenario({**rest, "workload": given}, HERE)
    return tokens(build_requests(scenario, 2**24, HERE))


def tokens(requests: list[Request]) -> tuple[np.ndarray, np.ndarray]:
    prompt, output = np.array([(one.prompt_tokens, one.output_tokens) for one in requests]).T
    return prompt, output


@pytest.mark.parametrize("ratio", [0, 0.07, 0.3, 0.5, 0.999])
def test_the_stated_length_is_the_mean(ratio: float) -> None:
    """Today's vLLM: floor(100 (1 - r)) to ceil(100 (1 + r)), each as likely."""
    lengths = {"kind": "random", "prompt": 100, "decode": 7, "range_ratio": ratio}
    prompt, output = drawn({"lengths": lengths})
    bounds = {0: (100, 100), 0.07: (93, 107), 0.3: (70, 130), 0.5: (50, 150), 0.999: (1, 199)}
    low, high = bounds[ratio]
    counts = Counter(prompt.tolist())
    assert set(counts) == set(range(low, high + 1))
    expected = len(prompt) / len(counts)
    assert all(abs(found - expected) < 6 * expected**0.5 for found in counts.values())
    assert output.min() >= 1 and (low + high) / 2 == 100
    assert prompt.mean() == pytest.approx(100, abs=6 * (high - low + 1) / 12**0.5 / 20_000**0.5)


def test_the_older_tools_draw_up_to_the_stated_length() -> None:
    lengths = {"kind": "random", "prompt": 100, "decode": 9, "tool": "sglang", "range_ratio": 0.8}
    prompt, output = drawn({"lengths": lengths})
    assert set(prompt) == set(range(80, 101)) and set(output) == {7, 8, 9}
    for tool in ("vllm", "sglang"):
        alike = drawn({"lengths": {"kind": "random", "prompt": 9, "decode": 3, "tool": tool}}, 50)
        assert (set(alike[0]), set(alike[1])) == ({9}, {3})
    for tool, ratio, said in (("vllm", 1, "less than 1"), ("sglang", 0, "more than 0")):
        with pytest.raises(UserError, match=f"range_ratio: value {ratio}.*: must be {said}"):
            drawn({"lengths": {**lengths, "tool": tool, "range_ratio": ratio}})


def test_a_range_of_ratios_is_even_over_its_logarithm() -> None:
    total = {"kind": "fixed", "total": 10_000}
    prompt, output = drawn({"lengths": total, "pd_ratio": {"low": 1, "high": 100}})
    assert (prompt + output == 10_000).all()
    shares, _ = np.histogram(np.log10(prompt / output), [-0.01, 0.5, 1, 1.5, 2.01])
    assert shares == pytest.approx(np.full(4, 5000), abs=300)
    again, _ = drawn({"lengths": total, "pd_ratio": {"low": 1, "high": 100}}, 500)
    assert (again == prompt[:500]).all()
    uniform = {"kind": "uniform", "min": 500, "max": 900}  # a stream of its own
    both = [np.sum(drawn({"lengths": uniform, "pd_ratio": pd}), axis=0)
            for pd in (4, {"low": 2, "high": 9})]  # fmt: skip
    assert (both[0] == both[1]).all()
    with pytest.raises(UserError, match=r"pd_ratio.high: value 2.*must be at least low, .* 3"):
        drawn({"lengths": total, "pd_ratio": {"low": 3, "high": 2}})
    with pytest.raises(UserError, match=r"workload\.pd_ratio\.most: unknown key"):
        drawn({"lengths": total, "pd_ratio": {"low": 3, "most": 2}})


@pytest.mark.parametrize(
    ("word", "means", "longest"),
    [
        ("1024:256", (1024, 256), 1536),
        ("1K:0.25k", (1024, 256), 1536),
        ("1024:256~0.5", (1024, 256), 2048),
        ("1024 : 256 ~ 0.9", (1024, 256), 2560),
        ("1000:24~0", (1000, 24), 1024),
        ("1K@15", (960, 64), 1024),
        # The mean of 1 / (1 + P:D): ln((1 + 1/5) / (1 + 1/50)) / ln 10, less half of a token.
        ("8K@5..50", (8192 * (1 - 0.070581), 8192 * 0.070581), 8192),
        ("8K@?", (8192 * (1 - 0.129881), 8192 * 0.129881), 8192),
    ],
)
def test_a_word(word: str, means: tuple[int, int], longest: int) -> None:
    section, max_length = parse_workload(word, None)
    assert max_length == longest and parse_workload(word, 99)[1] == 99
    prompt, output = drawn(section)
    assert (prompt.mean(), output.mean()) == pytest.approx(means, rel=0.02)
    assert int((prompt + output).max()) <= longest


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("1K:5..50", "total tokens and their P:D ratio are written 1K@5..50"),
        ("1024:14.5", "total tokens and their P:D ratio are written 1024@14.5"),
        ("1024:", "these are not lengths"),
        ("1024:256~x", "these are not lengths"),
        ("1024:256~1", "the spread 1 must be below 1"),
        ("0:256", "0 must be whole tokens"),
        ("1K@50..5", "P:D rise"),
        ("1@14", "the total must be at least 2"),
        ("1024", "1024: no such file, nor a shipped configuration"),
    ],
)
def test_a_wrong_word(word: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_workload(word, None)
    said = str(caught.value)
    assert said.startswith("--workload ") and problem in said
    assert said.endswith(FORMS) and "\n" not in said


@pytest.mark.parametrize("word", WORDS)
def test_it_is_the_same_traffic_everywhere(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In recommend, capacity, advise, workload, the library, and as a configuration has it."""
    found = {"function": tokens(requests_of(word))}
    wanted = {"model": "llama-13b", "device": "a6000", "gpus": 1, "slo": "p90 ttft 2s"}
    wanted |= {"workload": word, "dtype": "bf16", "budget": "256", "seqs": "8"}
    found["recommend"] = tokens(deployable(question(**wanted))[0][0].deployment.requests)
    _, _, (option,) = answer.read_question(CONFIG, (), word)
    assert option.scenario.workload.sessions is None
    arrivals = option.scenario.workload.arrivals
    assert (arrivals.kind, option.scenario.seed) == ("gamma", 0)
    few, workload = tokens(option.deployment.requests), option.scenario.workload.model_dump()
    assert all((a == b).all() for a, b in zip(drawn(workload, len(few[0])), few, strict=True))
    found["capacity"] = drawn(workload, 10_000)
    demand = demand_of(word)
    found["advise"] = demand.prompt, demand.output
    seen: list[Any] = []
    monkeypatch.setattr(answer, "with_workload", lambda *given: seen.append(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sim.capacity(CONFIG, workload=word)
    ((draft, given),) = seen
    assert given == word
    found["library"] = drawn(with_workload(draft, word).raw["workload"], 10_000)
    alike = {name: sorted(zip(*map(np.ndarray.tolist, pair), strict=True))
             for name, pair in found.items()}  # fmt: skip
    assert all(pairs == alike["function"] for pairs in alike.values()), alike.keys()
    (numbers,) = json.loads(called("workload", word, "--json").stdout)["workloads"].values()
    prompt, output = found["function"]
    assert numbers["prompt_tokens"]["sum"] == prompt.sum()
    assert numbers["output_tokens"]["sum"] == output.sum()
    assert (numbers["rate"], numbers["requests"]) == (None, 10_000)
    assert lengths_line(prompt, output) in demand.line()


def test_every_scenario_gets_the_lengths() -> None:
    other = {"lengths": {"kind": "fixed", "total": 64}, "arrivals": {"kind": "at_once"}}
    draft = read_draft({**CONFIG, "scenarios": {"a": {}, "b": {"workload": other}}})
    changed = with_workload(draft, "9:3")
    assert changed.overrides == {"a": {}, "b": {"workload": {"arrivals": {"kind": "at_once"}}}}
    assert changed.raw["workload"]["lengths"] == {"kind": "fixed", "prompt": 9, "decode": 3}
    assert changed.raw["workload"]["requests"] == 300 and draft.raw["workload"]["pd_ratio"] == 3
    assert with_workload(draft, None) is draft
    for key in ("workload.pd_ratio=3", "scenarios.a.workload.lengths.max=9"):
        with pytest.raises(UserError, match="has no effect: --workload gives lengths"):
            with_workload(read_draft({**CONFIG, "scenarios": {"a": {}}}, [key]), "9:3")
    with_workload(read_draft(CONFIG, ["workload.arrivals.cv=2"]), "9:3")


def test_a_trace_brings_its_own_number_and_its_longest_request(tmp_path: Path) -> None:
    """400 + 113 tokens are 513: the next whole 512 is 1,024."""
    path = tmp_path / "log.csv"
    path.write_text("prompt_tokens,output_tokens\n" + 20 * "400,112\n" + "400,113\n")
    section, longest = parse_workload(str(path), None)
    assert (longest, section.get("requests")) == (1024, None)
    assert parse_workload(str(path), 512)[1] == 512
    changed = with_workload(read_draft(CONFIG), str(path)).raw["workload"]
    assert "requests" not in changed and "sessions" not in changed
    assert len(requests_of(str(path))) == 21
    path.write_text("prompt_tokens,output_tokens\n7,x\n")
    with pytest.raises(UserError, match=r"--workload .*log\.csv: row 2"):
        parse_workload(str(path), None)


def test_what_the_command_refuses(tmp_path: Path) -> None:
    (log := tmp_path / "log.csv").write_text("prompt,decode\n8,2\n")
    for key, value in (("seed", 3), ("workload.arrivals.scale", 2)):
        assert f"--set {key}: a trace has" in refused("workload", log, "--set", f"{key}={value}")


def test_a_trace_with_failed_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands beside its configuration, which may be read from anywhere; so may the result."""
    for folder in ("beside", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "beside" / "log.csv").write_text("prompt,decode\n8,2\n9,0\n20,2\n")
    lengths = {"kind": "trace", "path": "log.csv", "skip_empty": True}
    config = {
        "name": "failed", "model": "llama-13b", "device": "a6000",
        "workload": {"lengths": lengths}, "cluster": {"max_length": 1024},
        "policy": {"name": "orca", "case": "best"},
    }  # fmt: skip
    (tmp_path / "beside" / "failed.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    skip = ("--set", "workload.lengths.skip_empty=true")
    said = called("workload", "beside/log.csv", *skip).output
    assert "2 requests" in said and "1 requests lack tokens and are left out" in said
    assert "left out" in called("workload", "beside/failed.yaml").output
    said = called(
        "run", "beside/failed.yaml", "--no-figures", "--out", "result", "--verbose"
    ).output
    assert "(skip_empty): 1 left out" in said
    monkeypatch.chdir(tmp_path / "elsewhere")
    called("report", "../result", "--out", "page.html")
    assert "no timeline" not in Path("page.html").read_text()


def test_a_logs_mean_rate_and_its_busiest_minute_stand_beside_the_answer(tmp_path: Path) -> None:
    """A request every 10 s for 20 minutes, and 60 more in one of them."""
    quiet, busy = [10 * n for n in range(121)], [600 + n + 0.5 for n in range(60)]
    path = tmp_path / "log.csv"
    rows = "".join(f"{at},400,20\n" for at in (*quiet, *busy))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    mean, busiest = 180 / 1200, (60 + 7) / 60
    assert rates_of(str(path)) == (pytest.approx(mean), pytest.approx(busiest))
    assert rates_of("400:20") is None
    path.write_text("prompt_tokens,output_tokens\n400,20\n")
    assert rates_of(str(path)) is None
    found = recommendation(rate=1.0, log_rates=(mean, busiest))
    told = "the trace has 0.15 requests/s on average and 1.12 in its busiest minute, 7.4 times"
    assert any(line.startswith(f"workload: {told}") for line in found.assumed)
    warned = "the trace has 1.12 requests/s in its busiest minute (0.15 on average), but --rate is"
    assert any(line.startswith(warned) for line in found.warnings)
    enough = recommendation(rate=2.0, log_rates=(mean, busiest))
    assert not any("busiest" in line for line in enough.warnings)
