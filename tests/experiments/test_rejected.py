"""A rejected request is not carried: what the commands say where requests are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from sarathi_sim.experiments.capacity.bounds import most_requests_per_s
from sarathi_sim.experiments.capacity.options import deployable
from sarathi_sim.experiments.report.page import write_page
from tests.experiments.small_config import called
from tests.experiments.small_laboratory import question

ASKED = {
    **{"model": "llama-13b", "device": "a6000", "gpus": 1, "slo": "p90 ttft 2s"},
    **{"dtype": "bf16", "budget": "256", "seqs": "16"},
}
HALF = """
name: half
model: llama-13b
device: a6000
workload:
  lengths: {kind: trace, path: long.csv}
  arrivals: {kind: gamma, rate: 1, cv: 0.2}
  declared: exact
  too_long: reject
cluster: {max_length: 512}
batching: {max_batch: 16}
policy: {name: sarathi, chunk_size: 256}
capacity:
  slo: p90 ttft 2s
  tolerance: 0.2
  requests: 3000
  replications: {least: 2, most: 2}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """400 requests, half of 900 prompt tokens, half of 100."""
    rows = [f"{number / 10},{900 if number % 2 else 100},4" for number in range(400)]
    header = "arrived_at,num_prefill_tokens,num_decode_tokens"
    (tmp_path / "long.csv").write_text("\n".join([header, *rows]))
    return tmp_path / "long.csv"


@pytest.fixture
def half(trace: Path) -> Path:
    (path := trace.parent / "half.yaml").write_text(HALF.replace("long.csv", str(trace)))
    return path


def recommended(trace: Path, *words: object, code: int = 0) -> Result:
    given = [(f"--{key}", value) for key, value in ASKED.items()]
    given.append(("--set", "tolerance=0.5"))
    asked = [word for pair in given for word in pair]
    out = trace.parent / "recommend"
    return called("recommend", *asked, "--workload", trace, "--out", out, *words, code=code)


def capacities(half: Path, *words: str) -> dict[str, Any]:
    out = half.with_name("capacity")
    words = ("--no-bands", "--workers", "1", "--json", "--out", str(out), *words)
    done = called("capacity", half, *words)
    return {**json.loads(done.stdout), "printed": done.stderr}


@pytest.mark.parametrize("there", [False, True])
def test_recommend_says_what_share_does_not_fit(trace: Path, there: bool) -> None:
    """And leaves the folder as it was."""
    out = trace.parent / "recommend"
    if there:
        out.mkdir()
    done = recommended(trace, "--set", "max_length=512", code=2)
    for said in ("50.0% of the requests are rejected", "needs 904 tokens", "--set rejected"):
        assert said in done.stderr
    assert "--set max_length" in done.stderr and "carries" not in done.stdout
    assert (list(out.iterdir()) == []) if there else not out.exists()


def test_recommend_chooses_a_length_that_fits(trace: Path) -> None:
    found = question(**ASKED, tolerance=0.5, workload=str(trace))
    assert found.max_length == 1024, "904 tokens, rounded up"
    options, dropped = deployable(found)
    assert not dropped and all(one.deployment.rejected == 0 for one in options)


@pytest.mark.slow
def test_recommend_counts_what_is_served(trace: Path) -> None:
    done = recommended(
        trace, "--set", "max_length=512", "--set", "rejected=0.5", "--workers", 1, "--json"
    )
    content = json.loads(done.stdout)
    best = content["deployments"][0]
    assert (content["may_reject"], best["rejected_share"]) == (0.5, 0.5)
    assert best["capacity"] == best["carries"] == pytest.approx(best["offered"] / 2)
    # A prompt of 100 tokens and its three decodes take about 50 ms at least.
    assert 10 < best["capacity"] <= best["saturation"] < 60
    assert "(50.0% of requests rejected) requests/s (" in content["answer"]
    assert any("50.0% of the requests are rejected" in one for one in content["warnings"])
    assert not any("rejected" in one for one in content["assumptions"])


def test_what_is_rejected_is_no_work(trace: Path) -> None:
    """The bound is that of the short requests alone."""
    rates = []
    for lengths in (str(trace), "100:4"):
        asked = question(**ASKED, tolerance=0.5, workload=lengths, max_length=512, rejected=0.5)
        ((option,), _) = deployable(asked)
        rates.append(most_requests_per_s(option))
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)  # sums in another order


def test_a_share_is_less_than_all(trace: Path) -> None:
    for wrong in ("1", "-0.1", "nan"):
        recommended(trace, "--set", f"rejected={wrong}", code=2)


def test_capacity_carries_nothing_where_requests_are_rejected(half: Path) -> None:
    content = capacities(half)
    (one,) = content["deployments"]
    assert (one["capacity"], one["rejected_share"]) == (0.0, 0.5)
    assert content["answer"] == (
        "best: none keeps the SLO: 50.0% of the requests, or more, are rejected."
    )
    (warning,) = content["warnings"]
    assert "50.0% of the requests are rejected, more than `rejected` allows: the" in warning
    assert "max_length is 512" in warning


@pytest.mark.slow
def test_capacity_counts_what_is_served(half: Path) -> None:
    content = capacities(half, "--set", "capacity.rejected=0.5")
    (one,) = content["deployments"]
    assert one["settled"], one["why_not"]
    assert one["capacity"] == pytest.approx(one["offered"] / 2)
    assert one["capacity"] <= one["saturation"]
    assert "(50.0% of requests rejected) requests/s" in content["answer"]
    assert "(50.0% of requests rejected)" in content["printed"]
    page = half.with_name("report.html")
    write_page([half.with_name("capacity")], page, None)
    assert "50.0% of the requests are rejected: the longest one needs 904" in page.read_text()


@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm", "sarathi_serve"])
def test_a_cache_smaller_than_every_request_is_no_result(policy: str, tmp_path: Path) -> None:
    few = f"scenarios={{v: {{policy: {{name: {policy}}}, kv_cache: {{num_blocks: 8}}}}}}"
    words, out = ("vllm_llama3_8b", "--set", few, "--out", tmp_path / "out"), tmp_path / "out"
    said = "scenarios.v.kv_cache.num_blocks: value 8: every request is rejected"
    assert said in called("run", *words, code=2).stderr
    if policy == "vllm":
        done = called("capacity", *words, "--set", "capacity.slo=p90 ttft 2s", code=2)
        assert "every request is rejected" in done.stderr and "Traceback" not in done.stderr
    assert not out.exists()


@pytest.mark.slow
def test_a_run_warns_of_rejections(half: Path) -> None:
    out, page = half.with_name("run"), half.with_name("report.html")
    done = called("run", half, "--out", out, "--json")
    content = json.loads(done.stdout)
    ((name, summary),) = content["scenarios"].items()
    told = f"{name}: 50.0% of the requests are rejected: the longest one needs 904 tokens"
    assert summary["rejected"] == 200
    assert content["warnings"][0].startswith(told)
    assert f"Keep in mind\n  {told}" in done.stderr
    assert not any("rejected" in one for one in content["assumptions"])
    write_page([out], page, None)
    assert told in page.read_text()
    assert "50.0% of the requests are rejected" in called("run", "--dry-run", half).stdout
