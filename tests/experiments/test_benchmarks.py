"""Files of load tools, written here as the tools write them, and what is read from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.config.requests import Traffic
from sarathi_sim.experiments.measured.load_tools import Benchmark, read_benchmarks
from sarathi_sim.experiments.measured.replay import read_server_runs
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import HERE

Save = Callable[..., Path]
WORKLOAD = {"requests": 1, "lengths": {"kind": "fixed", "prompt": 9, "decode": 2}}


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write objects as lines of a file, or one object on many lines."""

    def write(*objects: Any, name: str = "run.json", indent: int | None = None) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(one, indent=indent) for one in objects) + "\n")
        return path

    return write


def only(path: Path) -> Benchmark:
    (found,) = read_benchmarks(path)
    return found


def column(found: Benchmark, name: str) -> list[float]:
    assert found.requests is not None
    return found.requests[name].tolist()


def load_of(found: Benchmark) -> tuple[str, float | None, float, int | None]:
    return found.tool, found.rate, found.burstiness, found.concurrency


def means_of(found: Benchmark) -> tuple[float, ...]:
    return (
        *(found.requests_count, found.mean_prompt, found.mean_output, found.ttft_s, found.tpot_s),
        *(found.output_tokens_per_s, found.duration_s),
    )


# Three requests: prompts of 100, 200, 300 tokens, outputs of 3, 1, 2; TTFT 50, 60, 70 ms, TPOT 20
# ms; sent at 1.0, 1.5 and 1.25 s. The last token is at 1.56 s, 0.56 s after the first request.
MEANS = (3, 200.0, 2.0, 0.06, 0.02, 6 / 0.56, 0.56)

VLLM_MEANS: dict[str, Any] = {
    "date": "20261001-120000",
    "endpoint_type": "vllm",
    "backend": "vllm",
    "label": None,
    "request_rate": 4.0,
    "burstiness": 0.5,
    "max_concurrency": 8,
    "duration": 0.56,
    "completed": 3,
    "failed": 0,
    "total_input_tokens": 600,
    "total_output_tokens": 6,
    "request_goodput": None,
    "output_throughput": 6 / 0.56,
    "mean_ttft_ms": 60.0,
    "mean_tpot_ms": 20.0,
}
LISTS: dict[str, Any] = {
    "input_lens": [100, 200, 300],
    "output_lens": [3, 1, 2],
    "ttfts": [0.05, 0.06, 0.07],
    "itls": [[0.01, 0.03], [], [0.02]],
    "errors": ["", "", ""],
}
VLLM = VLLM_MEANS | LISTS | {"start_times": [1.0, 1.5, 1.25]}
SGLANG_MEANS: dict[str, Any] = {
    **{key: VLLM_MEANS[key] for key in VLLM_MEANS if key.startswith(("total", "mean", "comp"))},
    "tag": None,
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": 4.0,
    "max_concurrency": None,
    "random_input_len": 1024,
    "server_info": {"tp_size": 1},
    "duration": 0.56,
    "output_throughput": 6 / 0.56,
}


def record(start_ns: int, prompt: int, output: int, ttft: float, latency: float) -> dict[str, Any]:
    """A line of AIPerf's ``profile_export.jsonl``."""
    metrics = {
        "input_sequence_length": (prompt, "tokens"),
        "output_sequence_length": (output, "tokens"),
        "time_to_first_token": (ttft, "ms"),
        "request_latency": (latency, "ms"),
    }
    return {
        "metadata": {
            "request_start_ns": start_ns,
            "request_end_ns": start_ns + round(latency * 1e6),
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {
            name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()
        },
        "error": None,
    }


AIPERF = [
    record(1_000_000_000_000, 100, 3, 50.0, 90.0),
    record(1_000_500_000_000, 200, 1, 60.0, 60.0),
    record(1_000_250_000_000, 300, 2, 70.0, 90.0),
]
GENAI_PERF: dict[str, Any] = {
    "request_throughput": {"unit": "requests/sec", "avg": 3 / 0.56},
    "request_count": {"unit": "count", "avg": 3.0},
    "time_to_first_token": {"unit": "ms", "avg": 60.0, "p50": 60.0},
    "inter_token_latency": {"unit": "ms", "avg": 20.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 6 / 0.56},
    "output_sequence_length": {"unit": "tokens", "avg": 2.0},
    "input_sequence_length": {"unit": "tokens", "avg": 200.0},
    "input_config": {"perf_analyzer": {"stimulus": {"concurrency": 4}}},
}


def summary(*phases: dict[str, Any], **more: Any) -> dict[str, Any]:
    """AIPerf's ``profile_export_aiperf.json``."""
    config = {"models": {"items": [{"name": "m"}]}, "phases": list(phases)}
    return GENAI_PERF | {"aiperf_version": "0.13.0", "input_config": config} | more


def call(start: float, prompt: int, output: int, ttft: float, itl: float | None) -> dict[str, Any]:
    """A request of guidellm, which counts its latency to the end of the stream."""
    return {
        "type_": "generative_request_stats",
        "request_start_time": start,
        "request_latency": 9.0,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "time_to_first_token_ms": ttft,
        "inter_token_latency_ms": itl,
        "time_per_output_token_ms": 99.0,
    }


CALLS = [
    call(1001.0, 100, 3, 50.0, 20.0),
    call(1001.5, 200, 1, 60.0, None),
    call(1001.25, 300, 2, 70.0, 20.0),
]


def guidellm(strategy: dict[str, Any], calls: Any = CALLS, **totals: int) -> dict[str, Any]:
    means = {
        "prompt_token_count": 200.0,
        "output_token_count": 2.0,
        "time_to_first_token_ms": 60.0,
        "inter_token_latency_ms": 20.0,
        "output_tokens_per_second": 6 / 0.56,
    }
    counts = {"successful": 3, "errored": 0, "incomplete": 0} | totals
    return {
        "type_": "generative_benchmark",
        "config": {"strategy": {"max_concurrency": None, **strategy}, "sample_size": None},
        "metrics": {
            "request_totals": counts | {"total": sum(counts.values())},
            **{key: {"successful": {"mean": mean, "count": 3}} for key, mean in means.items()},
        },
        "requests": {"successful": calls, "errored": [], "incomplete": [], "total": None},
        "duration": 0.56,
    }


POISSON = {"type_": "poisson", "rate": 4.0, "random_seed": 42}


def report(*benchmarks: dict[str, Any]) -> dict[str, Any]:
    metadata = {"version": 2, "guidellm_version": "0.8.1"}
    return {"metadata": metadata, "config": {}, "benchmarks": list(benchmarks), "conclusions": []}


def test_every_tool_tells_the_same_run(save: Save) -> None:
    """vLLM's, AIPerf's and guidellm's files of the three requests hold the same table."""
    files = {
        "vLLM": save(VLLM, name="a.json"),
        "AIPerf": save(*AIPERF, name="profile_export.jsonl"),
        "guidellm": save(report(guidellm(POISSON)), name="benchmarks.json"),
    }
    for tool, path in files.items():
        found = only(path)
        assert (found.tool, found.name, found.failed) == (tool, path.stem, 0)
        assert means_of(found) == pytest.approx(MEANS)
        assert column(found, "arrival_s") == pytest.approx([0.0, 0.25, 0.5])
        assert column(found, "prompt_tokens") == [100, 300, 200]
        assert column(found, "output_tokens") == [3, 2, 1]
        assert column(found, "ttft_s") == pytest.approx([0.05, 0.07, 0.06])
        assert column(found, "tpot_s")[:2] == pytest.approx([0.02, 0.02])
        assert isnan(column(found, "tpot_s")[2]), "one token: none"
        assert column(found, "latency_s") == pytest.approx([0.09, 0.09, 0.06])
        (run,) = read_server_runs(path).values()
        assert run.requests["prompt_tokens"].tolist() == [100, 300, 200]


@pytest.mark.parametrize(
    ("names", "later"), [("aaa", 2), ("aba", 1), ("abc", 0), ([None] * 3, 0), ("a", 0)]
)
def test_later_turns_of_conversations_are_named(
    save: Save, names: Sequence[str | None], later: int
) -> None:
    lines = [record(10**9 * n, 100, 3, 50.0, 90.0) for n in range(3)]
    for line, name in zip(lines, names, strict=False):
        line["metadata"]["conversation_id"] = name
    (run,) = read_server_runs(save(*lines, name="profile_export.jsonl")).values()
    said = f"{later} requests are later turns of a conversation" if later else ""
    assert run.note.startswith(said) and bool(run.note) == bool(later)
    config = {"model": "any", "device": "any", "policy": {"name": "orca"}, "workload": WORKLOAD}
    requests = run.for_scenario(check_scenario(config, HERE), 999, HERE)
    assert isinstance(requests, Traffic)
    assert requests.notes == ([f"workload: {run.note}"] if later else [])


@pytest.mark.parametrize(
    ("content", "load"),
    [
        (VLLM_MEANS, ("vLLM", 4.0, 0.5, 8)),
        (VLLM_MEANS | {"request_rate": "inf"}, ("vLLM", None, 0.5, 8)),
        (SGLANG_MEANS, ("SGLang", 4.0, 1.0, None)),
        (SGLANG_MEANS | {"request_rate": inf, "max_concurrency": 2}, ("SGLang", None, 1.0, 2)),
        (GENAI_PERF, ("GenAI-Perf", None, 1.0, 4)),
        (
            GENAI_PERF | {"input_config": {"perf_analyzer": {"stimulus": {"request_rate": 2.0}}}},
            ("GenAI-Perf", 2.0, inf, None),
        ),
        (
            summary(
                {"name": "warmup", "type": "constant", "rate": 9.0, "exclude_from_results": True},
                {"name": "profiling", "type": "poisson", "rate": 4.0, "requests": 3},
            ),
            ("AIPerf", 4.0, 1.0, None),
        ),
        (summary({"type": "concurrency", "concurrency": 16}), ("AIPerf", None, 1.0, 16)),
        (summary({"type": "gamma", "rate": 4.0, "smoothness": 2.0}), ("AIPerf", 4.0, 2.0, None)),
        (
            summary(
                input_config={"loadgen": {"request_rate": 4.0, "request_rate_mode": "constant"}}
            ),
            ("AIPerf", 4.0, inf, None),
        ),
        (report(guidellm(POISSON, CALLS[:1])), ("guidellm", 4.0, 1.0, None)),
    ],
)
def test_means_only(save: Save, content: dict[str, Any], load: tuple[Any, ...]) -> None:
    """They are the tool's own, and a replay says what would keep the requests."""
    path = save(content, indent=2)
    found = only(path)
    assert load_of(found) == load and found.requests is None
    if found.tool in ("vLLM", "SGLang"):
        assert means_of(found) == pytest.approx(MEANS)
    flag = {
        "vLLM": "--save-detailed",
        "SGLang": "--output-details",
        "guidellm": "--sample-requests",
    }
    said = rf"run: has only means; .*{flag.get(found.tool, '--export-level records')}"
    with pytest.raises(UserError, match=said):
        read_server_runs(path)


def test_means_of_other_tools(save: Save) -> None:
    for content in (GENAI_PERF, summary(), report(guidellm(POISSON, []))):
        assert means_of(only(save(content))) == pytest.approx(MEANS)
    lone = {key: GENAI_PERF[key] for key in GENAI_PERF if key != "inter_token_latency"}
    assert isnan(only(save(lone)).tpot_s)
    assert isnan(only(save(VLLM_MEANS | {"mean_tpot_ms": 0.0})).tpot_s)
    assert only(save(summary(error_request_count={"unit": "requests", "avg": 2.0}))).failed == 2


@pytest.mark.parametrize(
    ("strategy", "load"),
    [
        ({"type_": "synchronous"}, (None, 1.0, 1)),
        ({"type_": "concurrent", "streams": 2}, (None, 1.0, 2)),
        ({"type_": "throughput", "max_concurrency": 512}, (None, 1.0, None)),
        ({"type_": "constant", "rate": 4.0}, (4.0, inf, None)),
        (POISSON, (4.0, 1.0, None)),
    ],
)
def test_loads_of_guidellm(save: Save, strategy: dict[str, Any], load: tuple[Any, ...]) -> None:
    found = only(save(report(guidellm(strategy))))
    assert load_of(found) == ("guidellm", *load) and found.requests is not None


def test_guidellm_0_3(save: Save) -> None:
    """It has other keys for the strategy, how many requests there were, and when each began."""
    run = guidellm(POISSON)
    run["args"] = run.pop("config")
    run["request_totals"] = run["metrics"].pop("request_totals")
    for one in (calls := json.loads(json.dumps(CALLS))):
        one["start_time"] = one.pop("request_start_time")
    run["requests"]["successful"] = calls
    assert means_of(only(save({"benchmarks": [run]}))) == pytest.approx(MEANS)


def test_several_runs_in_a_file(save: Save) -> None:
    """A sweep of guidellm, lines of SGLang, and what vLLM saves with ``--append-result``."""
    sweep = report(guidellm({"type_": "synchronous"}), guidellm(POISSON))
    appended = (VLLM, VLLM | {"request_rate": "inf"})
    lines = (SGLANG_MEANS | LISTS, SGLANG_MEANS | LISTS | {"request_rate": 8.0})
    for path in (save(sweep, name="s.json"), save(*lines, name="s.jsonl"), save(*appended)):
        names = [one.name for one in read_benchmarks(path)]
        assert names == [f"{path.stem} 1", f"{path.stem} 2"] == list(read_server_runs(path))


def test_arrivals_that_were_not_recorded(save: Save) -> None:
    gaps = np.random.RandomState(0).exponential(1 / 4, 2)
    found = only(save(SGLANG_MEANS | LISTS))
    assert column(found, "arrival_s") == pytest.approx([0.0, gaps[0], gaps.sum()])
    # `vllm bench serve` stretches three gaps to three over the rate, and waits for the first too.
    gaps = np.random.RandomState(0).gamma(0.5, 1 / 2, 3)
    gaps *= 0.75 / gaps.sum()
    stretched = only(save(VLLM_MEANS | LISTS))
    assert column(stretched, "arrival_s") == pytest.approx([0.0, gaps[1], gaps[1] + gaps[2]])
    constant = only(save(VLLM_MEANS | LISTS | {"burstiness": inf, "max_concurrency": None}))
    assert column(constant, "arrival_s") == pytest.approx([0.0, 0.25, 0.5], abs=1e-4)
    # Two clients: the first two requests end at 0.09 and 0.06 s, so the third is sent at 0.06 s.
    closed = only(save(SGLANG_MEANS | LISTS | {"request_rate": inf, "max_concurrency": 2}))
    assert column(closed, "arrival_s") == pytest.approx([0.0, 0.0, 0.06])
    assert closed.duration_s == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ([VLLM | {"errors": ["", "refused", ""], "start_times": [1.0, 0.0, 1.25]}], "vLLM"),
        ([VLLM | {"output_lens": [3, 0, 2], "errors": None}], "vLLM"),
        ([AIPERF[0], AIPERF[1] | {"metrics": {}, "error": {"code": 499}}, AIPERF[2]], "AIPerf"),
        ([AIPERF[0], {"metadata": {"was_cancelled": True}, "metrics": {}}, AIPERF[2]], "AIPerf"),
        ([report(guidellm(POISSON, CALLS[::2], successful=2, errored=1))], "guidellm"),
        ([report(guidellm(POISSON, CALLS[::2], successful=2, incomplete=1))], "guidellm"),
    ],
)
def test_failed_requests_are_left_out_and_counted(
    save: Save, lines: list[dict[str, Any]], name: str
) -> None:
    found = only(save(*lines))
    assert (found.tool, found.failed, found.requests_count) == (name, 1, 2)
    assert column(found, "prompt_tokens") == [100, 300]
    assert found.mean_output == 2.5 and found.ttft_s == pytest.approx(0.06)
    assert found.duration_s == pytest.approx(0.34)


def test_a_warm_up_is_left_out(save: Save) -> None:
    warm = record(0, 7, 2, 1.0, 2.0)
    warm["metadata"]["benchmark_phase"] = "warmup"
    found = only(save(warm, *AIPERF))
    assert means_of(found) == pytest.approx(MEANS) and found.failed == 0


def served(prompt: int = 1, queued: float = 1.0, first: float = 2.0) -> dict[str, Any]:
    """A line of LLMServingSim's ``requests.jsonl``."""
    times = {"queued_ts": queued, "first_token_ts": first, "last_token_ts": 3.0}
    return {"request_id": "bench", "input_toks": prompt, "output_toks": 1, **times}


def changed(line: dict[str, Any], metric: str, **to: Any) -> dict[str, Any]:
    metrics = line["metrics"]
    return line | {"metrics": metrics | {metric: metrics[metric] | to}}


def unstreamed(line: dict[str, Any]) -> dict[str, Any]:
    metrics = {k: v for k, v in line["metrics"].items() if k != "time_to_first_token"}
    return line | {"metrics": metrics}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "(?s)is not the file of a load tool.*vllm bench.*sglang.*aiperf profile.*guidellm be"),
        ([{"some": "file"}], "is not the file of a load tool .*: it has the keys 'some'; these"),
        ([[1, 2]], "it does not begin with a JSON object"),
        ([{"experiments": [{"requests": []}]}], r"no token counts: give the \*_genai_perf.json"),
        ([{**VLLM, "ttfts": [0.1, float("nan"), 0.1]}], "line 1: ttfts.1: .* finite number"),
        ([{**VLLM, "ttfts": [0.0, 0.1, 0.1]}], "a time to first token is 0"),
        ([{**VLLM, "itls": [[0.1]] * 100_000}], "itls: must have 3 entries, as input_lens has"),
        ([{**VLLM, "start_times": [1.0]}], "start_times: must have 3 entries"),
        ([{**VLLM, "output_lens": [0, 0, 0]}], r"no requests that succeeded \(3 failed\)"),
        ([{**VLLM, "input_lens": [10**400, 1, 1]}], "input_lens.0: .* at most 16777216"),
        ([{**VLLM, "request_rate": float("nan")}], "request_rate: .* more than 0"),
        ([{**VLLM_MEANS, "completed": 0, "failed": 9}], r"no requests that succeeded \(9 failed\)"),
        ([{**VLLM_MEANS, "completed": 1.5}], "completed: .* a whole number"),
        ([SGLANG_MEANS, SGLANG_MEANS | {"duration": None}], "line 2: duration: value null: must b"),
        ([served(prompt=0)], "line 1: input_toks: "),
        ([served(), served(queued=2.0, first=1.0)], "line 2: .*must follow"),
        ([AIPERF[0], {"metrics": {}}], "line 2: metadata.request_start_ns: this key is missing"),
        ([unstreamed(AIPERF[0])], "first_token.value: this key is missing: answers must be strea"),
        ([changed(AIPERF[0], "time_to_first_token", unit="sec")], "metrics.time_to_first_token.un"),
        ([changed(AIPERF[0], "request_latency", value=1.0)], "ends before the first token"),
        ([AIPERF[1] | {"error": {"type": "x"}}], r"no requests that succeeded \(1 failed\)"),
        ([summary({"type": "fixed_schedule"})], "input_config.phases.0.type: .*: one of conc"),
        ([{"benchmarks": []}], "benchmarks: .*at least 1 item"),
        ([report(guidellm({"type_": "no"}))], r"benchmarks.0: config.strategy.type_: .*, poisson"),
        (
            [report(guidellm(POISSON, [CALLS[0] | {"time_to_first_token_ms": None}] * 3))],
            "benchmarks.0: requests.successful.0.time_to_first_token_ms: ",
        ),
    ],
)
def test_files_that_are_refused(save: Save, content: list[Any], message: str) -> None:
    """With file, line and key, and what is allowed."""
    with pytest.raises(UserError, match=message) as refused:
        read_benchmarks(save(*content))
    assert "run.json" in str(refused.value)


def test_keys_that_are_missing(save: Save) -> None:
    """Without any one key that is read, a file is refused, and the key is named."""
    for content, keys in (
        (VLLM, ("request_rate", "input_lens", "output_lens", "ttfts", "itls")),
        (VLLM_MEANS, ("completed", "total_input_tokens", "mean_tpot_ms", "duration")),
        (GENAI_PERF, ("request_count", "time_to_first_token", "request_throughput")),
    ):
        for key in keys:
            lacking = {name: value for name, value in content.items() if name != key}
            with pytest.raises(UserError, match=rf"{key}.*: this key is missing"):
                read_benchmarks(save(lacking))
