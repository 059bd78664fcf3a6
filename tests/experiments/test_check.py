"""A way to check an answer: the load tool's command for a question, and what score says of the file
that it writes."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sarathi_sim.experiments.capacity.launch import RESULT, TRACE, load_test
from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.loading import check_scenario, load_experiment
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.measured import score
from sarathi_sim.experiments.measured.replay import Overheads, cases_of, simulated
from sarathi_sim.experiments.report.score_answers import CHECKED, score_section
from tests.experiments.small_config import HERE, called, deployed
from tests.experiments.small_report import recorded_run

OPTIONS = {
    "vllm": "backend base-url model dataset-name dataset-path result-filename trust-remote-code! "
    "num-prompts=int seed=int timed-trace-chunk-hash-size=int no-self-timed! random-input-len=int "
    "random-output-len=int random-range-ratio=float request-rate=float burstiness=float "
    "max-concurrency=int ignore-eos! save-result! save-detailed!",
    "sglang": "backend base-url model num-prompts=int seed=int dataset-name tokenize-prompt! "
    "random-input-len=int random-output-len=int random-range-ratio=float request-rate=float "
    "max-concurrency=int output-file output-details!",
}
"""Options that each tool has (``!``: without a value): read in ``vllm bench serve`` of 0.23, 0.32
and 0.33 and in ``sglang.benchmark.serving`` 0.5.23."""
TYPES = {"int": int, "float": float}
PROGRAMS = {"vllm bench serve": "vllm", "python -m sglang.bench_serving": "sglang"}
POISSON = {"kind": "poisson", "rate": 2.5}
FIXED = {"kind": "fixed", "prompt": 200, "decode": 20}
UNEQUAL = {"kind": "quantiles", "prompt": {"p0": 1, "p100": 900}, "decode": {"p0": 1, "p100": 50}}


def drawn(tool: str) -> dict[str, Any]:
    return {"kind": "random", "prompt": 200, "decode": 20, "range_ratio": 0.5, "tool": tool}


def asked(of: str, lengths: Any, arrivals: Any = POISSON, **keys: Any) -> Scenario:
    """A question of forty requests."""
    workload = {"requests": 40, "lengths": lengths, "arrivals": arrivals, "declared": "exact"}
    formats = {"kv_cache_dtype": "fp8"} if of == "trtllm" else {}
    tree = {"model": "qwen3-32b", "device": "h100-80g-sxm", "stack": of, "seed": 5, **formats}
    tree |= {"cluster": {"tp": 2, "max_length": 1024}, "policy": {"name": of}, "kv_cache": {}}
    workload |= keys.pop("workload", {})
    return check_scenario({**tree, "workload": workload, **keys}, HERE)


def sent(scenario: Scenario) -> tuple[str, str]:
    found = load_test(scenario)
    assert found is not None
    return found


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """The tool, and what its options are."""
    line = command.splitlines()[-1]
    tool = next(tool for program, tool in PROGRAMS.items() if line.startswith(program))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in OPTIONS[tool].split():
        name, _, kind = option.partition("=")
        about: Any = {"action": "store_true"} if name[-1] == "!" else {"type": TYPES.get(kind, str)}
        parser.add_argument(f"--{name.rstrip('!')}", **about)
    return tool, vars(parser.parse_args(shlex.split(line)[3:]))


RANDOM = {"dataset_name": "random", "random_input_len": 200, "random_output_len": 20}
RANDOM |= {"random_range_ratio": 0.0, "request_rate": 2.5, "burstiness": None}
IDS = {"dataset_name": "random-ids", "tokenize_prompt": True, "random_input_len": 200}
IDS |= {"random_output_len": 20, "random_range_ratio": 1.0, "request_rate": 2.5}
BURSTS, CLIENTS = {"kind": "gamma", "rate": 3, "cv": 2}, {"kind": "closed_loop", "clients": 8}
REPLAYED = {"dataset_name": "timed_trace", "dataset_path": TRACE}
AT_ONCE = {"request_rate": math.inf, "max_concurrency": 8}


@pytest.mark.parametrize(
    ("engine", "lengths", "arrivals", "tool", "options"),
    [
        ("vllm", FIXED, POISSON, "vllm", RANDOM),
        ("vllm", drawn("vllm"), BURSTS, "vllm",
         RANDOM | {"random_range_ratio": 0.5, "request_rate": 3.0, "burstiness": 0.25}),
        ("vllm", FIXED, CLIENTS, "vllm", RANDOM | AT_ONCE),
        ("vllm", FIXED, {"kind": "at_once"}, "vllm", RANDOM | {"request_rate": math.inf}),
        ("vllm", drawn("sglang"), POISSON, "vllm", REPLAYED),
        ("vllm", UNEQUAL, CLIENTS, "vllm", REPLAYED | AT_ONCE | {"no_self_timed": True}),
        ("vllm", FIXED, {"kind": "varying", "rates": [{"at_s": 0, "rate": 3}]}, "vllm", REPLAYED),
        ("trtllm", FIXED, POISSON, "vllm", RANDOM),
        ("sglang", FIXED, POISSON, "sglang", IDS),
        ("sglang", drawn("sglang"), CLIENTS, "sglang", IDS | AT_ONCE | {"random_range_ratio": 0.5}),
        ("sglang", drawn("vllm"), POISSON, "vllm", RANDOM | {"random_range_ratio": 0.5}),
        ("sglang", FIXED, BURSTS, "vllm", RANDOM | {"request_rate": 3.0, "burstiness": 0.25}),
        ("sglang", UNEQUAL, POISSON, "vllm", REPLAYED),
    ],
)  # fmt: skip
def test_the_load_is_the_question(
    engine: str, lengths: Any, arrivals: Any, tool: str, options: dict[str, Any]
) -> None:
    command, trace = sent(asked(engine, lengths, arrivals))
    used, found = parsed(command)
    port = 30000 if engine == "sglang" else 8000
    options |= {"num_prompts": 40, "seed": 5, "base_url": f"http://localhost:{port}"}
    saved = {"vllm": ("result_filename", "save_result", "save_detailed", "ignore_eos"),
             "sglang": ("output_file", "output_details")}  # fmt: skip
    options |= dict(zip(saved[tool], (RESULT, True, True, True), strict=False))
    assert (used, {key: found[key] for key in options}) == (tool, options)
    assert found["model"] == "Qwen/Qwen3-32B"
    assert bool(trace) == (found.get("dataset_path") == TRACE)
    assert ("This is vLLM's tool" in command) == (engine == "sglang" != tool)
    assert f"sarathi-sim score {RESULT} --config winner.yaml" in command


def test_a_trace_has_every_request_that_fits() -> None:
    """As it is simulated: the tool makes a prompt of one number as long as its line says."""
    long = UNEQUAL | {"prompt": {"p0": 1, "p100": 1100}}
    scenario = asked("vllm", long, workload={"too_long": "reject"})
    command, trace = sent(scenario)
    tree = {"name": "x", **scenario.model_dump(mode="json", exclude_none=True)}
    (one,) = deployed(tree).values()
    fitting = [r for r in one.requests if r.prompt_tokens + r.output_tokens <= 1024]
    lines = [json.loads(line) for line in trace.splitlines()]
    assert 30 < len(lines) < 40 and f"too long: {40 - len(lines)} requests." in command
    for line, request in zip(lines, fitting, strict=True):
        assert line["timestamp"] == pytest.approx(request.arrival_s, abs=1e-6)
        lengths = line["input_length"], line["output_length"]
        assert lengths == (request.prompt_tokens, request.output_tokens)
    _, options = parsed(command)
    assert options["num_prompts"] == len(lines)
    assert options["timed_trace_chunk_hash_size"] == max(line["input_length"] for line in lines)
    assert len({tuple(line["hash_ids"]) for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"cluster": {"replicas": 3, "max_length": 1024}}, "a router in front of all 3 replicas"),
        ({"workload": {"system_prompts": {"a": {"share": 1, "tokens": 90}}}}, "share nothing"),
        ({"speculation": {"method": "ngram", "draft_length": 1, "acceptance": [0.5]}}, "drafts"),
        ({"workload": {"arrivals": CLIENTS | {"think_s": 1}}}, "simulated ones wait"),
        ({"disaggregation": {"prefill": {}, "decode": {}}}, "localhost:8192 "),
    ],
)
def test_what_a_load_does_not_have_is_said(keys: dict[str, Any], told: str) -> None:
    assert told in sent(asked("vllm", FIXED, **keys))[0]


def test_no_tool_sends_sessions_and_none_knows_a_model_without_a_checkpoint() -> None:
    turns = {"sessions": {"max_turns": 3, "think_s": 1}}
    assert load_test(asked("vllm", FIXED, workload=turns)) is None
    assert load_test(asked("vllm", FIXED, model="gpt3-175b", cluster={"tp": 8})) is None


# What score says of its file -------------------------------------------------------------------


def winner(tmp_path: Path, of: str, **keys: Any) -> Path:
    """What recommend writes of a question."""
    scenario = asked(of, FIXED, model="llama-3.1-8b", **keys)
    section = {"slo": "p99 ttft 1s"}
    tree = {"name": "winner", "capacity": section, **scenario.model_dump(exclude_none=True)}
    (path := tmp_path / "winner.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(tree))))
    return path


def saved(tool: str, served: Deployment, overheads: Overheads, options: dict[str, Any]) -> str:
    """The file of a tool: what it says of its load, and what it saw of the server."""
    table = simulated(overheads.of(served)).requests
    arrival, count = table["arrival_s"].to_numpy(), len(table)
    ends = float((table["arrival_s"] + table["latency_s"]).max())
    means = {
        "duration": ends, "completed": count, "total_input_tokens": 200 * count,
        "total_output_tokens": 20 * count, "output_throughput": 20 * count / ends,
        "mean_ttft_ms": 1e3 * table["ttft_s"].mean(), "mean_tpot_ms": 1e3 * table["tpot_s"].mean(),
    }  # fmt: skip
    details = {
        "input_lens": [200] * count, "output_lens": [20] * count, "ttfts": table["ttft_s"].tolist(),
        "itls": [[gap] * 19 for gap in table["tpot_s"]], "generated_texts": ["a"] * count,
        "errors": [""] * count,
    }  # fmt: skip
    about = {"backend": options["backend"], "max_concurrency": None}
    if tool == "sglang":
        lengths = {key: options[key] for key in options if key.startswith("random")}
        about |= {"tag": None, "dataset_name": "random-ids", "request_rate": 2.5, **lengths}
        return json.dumps(about | means | {"sharegpt_output_len": None} | details) + "\n"
    about |= {"date": "20261127-120000", "endpoint_type": "openai", "label": "openai"}
    about |= {"model_id": options["model"], "num_prompts": count, "burstiness": 1.0}
    about |= {"request_rate": options["request_rate"], "request_goodput": None, "failed": 0}
    return json.dumps(about | means | details | {"start_times": (7e4 + arrival).tolist()})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_file_of_the_load_goes_through_score(engine: str, tmp_path: Path) -> None:
    """A server that is as predicted is inside every band, and one with kernels of half again is
    not inside those of the time per output token."""
    config = winner(tmp_path, engine)
    tool, options = parsed(sent(load_experiment(str(config)).scenarios["winner"])[0])
    (served,) = deployed(config).values()
    own = Overheads.configured(served.scenario.engine)
    for kernels, inside in ((1.0, True), (1.5, False)):
        truth = Overheads(**vars(own) | {"kernels": kernels})
        (tmp_path / RESULT).write_text(saved(tool, served, truth, options))
        done = called("score", tmp_path / RESULT, "--config", config, "--json")
        check = json.loads(done.stdout)["runs"]["measured"]["check"]
        for statistic in ("mean", "p50", "p99"):
            assert check[f"tpot_s.{statistic}"]["inside"] == inside
        if inside and tool == "vllm":  # SGLang's file does not say when it sent a request
            assert all(one["inside"] for one in check.values())
            off = [one["predicted"] / one["measured"] - 1 for one in check.values()]
            assert np.abs(off).max() < 1e-6
    assert "Predicted and measured" in done.stderr and "fitted to these" not in done.stderr


ALONE = {"requests": 1, "arrivals": {"kind": "at_once"}}
NO_HOST_OF_DECODES = {"host_iteration_s": 0, "host_sequence_s": 0}
NO_HOST = {**NO_HOST_OF_DECODES, "frontend_s": 0}


@pytest.mark.parametrize("host", [NO_HOST, {**NO_HOST, "frontend_s": 0.5}])
def test_a_band_joins_the_errors_of_ops_host_and_stack(
    host: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request alone every time goes with its ops; the front end is in its TTFT, and twice as
    long or half. TTFT of vLLM's dense servers is off by 0.1874 (a standard deviation), TPOT by 0
    (data/host_time.yaml)."""
    config = winner(tmp_path, "vllm", workload=ALONE, engine=host)
    (served,) = deployed(config).values()
    own = Overheads.configured(served.scenario.engine)
    (tmp_path / RESULT).write_text(
        saved("vllm", served, own, {"backend": "", "model": "", "request_rate": "inf"})
    )
    (case,) = cases_of(load_experiment(str(config)), [tmp_path / RESULT])
    monkeypatch.setattr(score, "op_time_factors", lambda *_: [0.9, 1.2])
    plain = case.under(own)
    found = score.bands_of(case, plain, own)
    (ttft,), (tpot,), (latency,) = (plain.requests[m] for m in ("ttft_s", "tpot_s", "latency_s"))
    front = host["frontend_s"]
    up, down = 1.2 - 1, 1 - 0.9
    wide, narrow = ttft * math.expm1(1.645 * 0.1874), ttft * -math.expm1(-1.645 * 0.1874)
    expected = {
        "tpot_s.mean": (tpot * (1 - down), tpot * (1 + up)),
        "ttft_s.p99": (ttft - math.hypot((ttft - front) * down, front / 2, narrow),
                       ttft + math.hypot((ttft - front) * up, front, wide)),
        "latency_s.p50": (latency - math.hypot((latency - front) * down, front / 2, narrow),
                          latency + math.hypot((latency - front) * up, front, wide)),
    }  # fmt: skip
    for path, band in expected.items():
        assert found[path] == pytest.approx(band, rel=1e-5), path
    if not front:
        tokens = 20 / latency
        band = (tokens / 1.2, tokens / 0.9)
        assert found["output_tokens_per_s"] == pytest.approx(band, rel=1e-5)


def test_overheads_reach_both_pools(tmp_path: Path) -> None:
    """Kernels that take twice as long double the TPOT of a request alone, and its prompt's time."""
    pools = {
        "prefill": {"stack": "vllm", "engine": NO_HOST},
        "decode": {"stack": "vllm", "engine": NO_HOST_OF_DECODES},
    }
    config = winner(tmp_path, "vllm", workload=ALONE, stack=None, disaggregation=pools)
    (served,) = deployed(config).values()
    assert score.errors_of(served), "those of the pools' own stack"
    options = {"backend": "", "model": "", "request_rate": "inf"}
    (tmp_path / RESULT).write_text(saved("vllm", served, Overheads(), options))
    called("score", tmp_path / RESULT, "--config", config)
    once, twice = (
        simulated(Overheads(kernels=factor, links=factor).of(served)).requests for factor in (1, 2)
    )
    assert twice["tpot_s"].mean() == pytest.approx(2 * once["tpot_s"].mean(), rel=0.05)
    assert twice["ttft_s"].mean() > 1.5 * once["ttft_s"].mean()


def test_one_table_says_predicted_measured_and_inside() -> None:
    """Of two runs the number furthest off of those outside their band is named."""
    first = recorded_run(dict.fromkeys(CHECKED, (2.0, 2.0, 1.0, 3.0)))
    second = recorded_run(
        {
            "ttft_s.p99": (0.3, 0.9, 0.2, 1.0),
            "tpot_s.mean": (0.02, 0.04, 0.01, 0.03),
            "ttft_s.p90": (1.0, 9.0, 1.0, 2.0),
        }
    )
    both = score_section({"runs": {"first": first, "second": second}})
    assert both.answer == (
        "inside the 90 % band: 11 of 12 numbers; largest error: time per output token, mean (s) of "
        "second: 0.02 predicted, 0.04 measured."
    )
    table = both.tables[0]
    headings = ["run", "metric", "predicted", "measured", "error", "90 % band", "in band"]
    last = ["second", "time per output token, mean (s)", "0.02", "0.04", "-50.0 %"]
    assert list(table.headings) == headings
    assert table.rows[-1] == [*last, "0.01 to 0.03", "no"]
    alone = score_section({"runs": {"second": second}})
    assert len(alone.tables[0].rows) == 2 and len(alone.tables[0].headings) == 6
    assert "of second" not in alone.answer
