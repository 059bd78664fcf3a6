"""MLPerf's runs: the reader, LoadGen's requests, the scenario of a run, and its prediction."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.capacity.search import Probe
from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.inputs import host_times
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.lab.servers import mlperf
from sarathi_sim.experiments.lab.servers.mlperf import (
    CAPACITY,
    LATENCIES,
    MlperfHost,
    MlperfRun,
    PredictedRun,
    requests_of,
    scenario_of,
    schedule_s,
    with_host,
)
from sarathi_sim.experiments.lab.servers.rows import read_tables
from sarathi_sim.experiments.run.uncertainty import capacity_error as shipped_error
from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import called

pytestmark = pytest.mark.lab

SHARED = Path(os.environ.get("SARATHI_SIM_DATASETS", "none")).parent / "mlperf"

ROW = {
    "id": "a", "gpu": "H200-SXM", "n_gpus": "8", "model": "llama2-70b", "scenario": "Server",
    "scheduled_samples_per_s": "100.1", "target_rate_per_s": "100", "offline_samples_per_s": "119",
    "n_queries": "10", "schedule_rng_seed": "18209322760996052031", "schedule_duration_s": "0.1",
    "output_tokens_mean": "290.5", "ttft_ms_mean": "381", "ttft_ms_p99": "810",
    "tpot_ms_mean": "179", "tpot_ms_p99": "192", "ttft_limit_ms": "2000", "tpot_limit_ms": "200",
    "measurement_weight_type": "fp8", "engine": "TensorRT-LLM", "engine_version": "", "tp": "1",
    "pp": "1", "attention_dp": "", "kv_precision": "fp8", "max_batch_size": "2048",
    "max_num_tokens": "1536", "max_seq_tokens": "2048", "chunked_prefill": "1",
    "batch_scheduler_policy": "max_util", "kv_free_gpu_mem_fraction": "0.9",
    "tokens_per_block": "32", "other_flags": "",
}  # fmt: skip


def run_of(**cells: str) -> MlperfRun:
    return MlperfRun.model_validate({k: v for k, v in {**ROW, **cells}.items() if v})


def test_a_table_is_read_and_bad_rows_are_refused_alone(tmp_path: Path) -> None:
    rows = [{"tp": "", "pp": ""}, {"tpot_ms_p99": "-1"}, {"batch_scheduler_policy": "other"}]
    rows = [{}, *({"id": id} | row for id, row in zip("bcd", rows, strict=True))]
    path = write_table(tmp_path / "runs.csv", *rows)
    found, refused = read_tables([path], MlperfRun)
    assert [run.id for run in found] == ["a", "b"]
    assert (found[0].rate, found[0].schedule_rng_seed) == (100.1, 18209322760996052031)
    assert "tpot_ms_p99" in refused["c"] and "batch_scheduler_policy" in refused["d"]
    (short := tmp_path / "short.csv").write_text("id,gpu\na,B200\n")
    with pytest.raises(UserError, match="column n_gpus is missing"):
        read_tables([short], MlperfRun)


def test_gaps_are_those_of_the_standard_twister() -> None:
    """C++'s standard states the 10,000th word from seed 5489; the first are known, too."""
    seed, rate = 5489 + 2**32 * 7, 50.0  # the upper half of the seed does not count
    twister = np.random.RandomState(5489)
    words = twister.randint(0, 2**32, 10_000, dtype=np.uint32)
    assert words[[0, 1, -1]].tolist() == [3499211612, 581869302, 4123659995]
    low, high = 3499211612, 581869302
    first_s = -math.log(1 - (low + high * 2**32) / 2**64) / rate
    gaps = mlperf.gaps_ns(seed, rate, 5000)
    assert gaps[0] == int(first_s * 1e9) == pytest.approx(0.1456 / 50 * 1e9, rel=1e-3)
    assert gaps.mean() == pytest.approx(1e9 / rate, rel=0.05)
    run = run_of(schedule_rng_seed=str(seed), target_rate_per_s="50")
    assert schedule_s(run).tolist()[:3] == [0.0, gaps[0] / 1e9, (gaps[0] + gaps[1]) / 1e9]


def write_table(path: Path, *rows: dict[str, str]) -> Path:
    lines = [",".join(ROW), *(",".join({**ROW, **row}.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def lengths(folder: Path, model: str) -> None:
    name = "served_output_tokens_fp8" if model == "llama2-70b" else "reference_output_tokens"
    outputs = ["", "100", "", "200"] if model == "llama2-70b" else ["100", "200", "300", "400"]
    rows = [f"{i},{10 * (i + 1)},{output}" for i, output in enumerate(outputs)]
    text = "\n".join([f"sample_index,input_tokens,{name}", *rows])
    (folder / f"lengths_{model}.csv").write_text(text + "\n")


def test_a_round_has_every_sample_once_and_outputs_have_the_runs_mean(tmp_path: Path) -> None:
    lengths(tmp_path, "mixtral-8x7b")
    run = run_of(model="mixtral-8x7b", output_tokens_mean="125", n_queries="12")
    found = requests_of(run, tmp_path)
    for start in (0, 4, 8):
        assert sorted(found.prompt[start : start + 4].tolist()) == [10, 20, 30, 40]
    assert (found.output * 2 == found.prompt * 10).all()  # half of the reference's
    assert found.arrival_s is not None and found.arrival_s.tolist() == schedule_s(run).tolist()
    other = requests_of(run, tmp_path, seed=1)
    assert other.prompt.tolist() != found.prompt.tolist()
    assert requests_of(run, tmp_path).prompt.tolist() == found.prompt.tolist()


def test_few_served_outputs_are_drawn_for_any_input(tmp_path: Path) -> None:
    lengths(tmp_path, "llama2-70b")
    found = requests_of(run_of(n_queries="4000", output_tokens_mean="150"), tmp_path)
    assert len(set(found.output.tolist())) == 2
    assert found.output.mean() == pytest.approx(150, abs=0.5)
    assert np.corrcoef(found.prompt, found.output)[0, 1] == pytest.approx(0, abs=0.05)
    with pytest.raises(UserError, match="column served_output_tokens_fp4 is missing"):
        requests_of(run_of(measurement_weight_type="fp4"), tmp_path)


def test_outputs_of_one_length_and_no_longer_than_the_engine(tmp_path: Path) -> None:
    lengths(tmp_path, "llama3.1-8b")
    run = run_of(model="llama3.1-8b", output_tokens_mean="128.99")
    assert set(requests_of(run, tmp_path).output.tolist()) == {129}
    found = requests_of(run.model_copy(update={"max_seq_tokens": 140}), tmp_path)
    assert set(found.output[found.prompt == 40]) == {100}
    assert set(found.output[found.prompt == 10]) == {129}
    whole = mlperf.scaled(np.array([100.0, 200.0, 900.0]), 500.0, 1000)
    assert whole.tolist() == [167, 333, 1000], "what is cut does not lower the mean"


def test_the_scenario_of_a_run() -> None:
    trace = Path("trace.csv")
    found = scenario_of(run_of(), trace)
    assert found == {
        "model": "llama-2-70b", "device": "h200-sxm", "stack": "trtllm@1.0", "dtype": "fp8",
        "kv_cache_dtype": "fp8",
        "cluster": {"tp": 1, "pp": 1, "replicas": 8, "router": "least_requests",
                    "max_length": 2048},
        "workload": {"lengths": {"kind": "trace", "path": "trace.csv"},
                     "arrivals": {"kind": "trace"}},
        "policy": {"name": "trtllm", "max_num_tokens": 1536, "max_batch_size": 2048,
                   "capacity_scheduler_policy": "max_utilization", "enable_chunked_prefill": True,
                   "disable_overlap_scheduler": True},
        "kv_cache": {"free_gpu_memory_fraction": 0.9, "block_size": 32, "prefix_caching": False},
        "engine": {"frontend_s": 0.0, "executor": "tensorrt"},
    }  # fmt: skip
    check_scenario(found, Source("mlperf", "a", {}, ()))
    lent = scenario_of(run_of(gpu="H200-NVL"), trace)
    assert lent["device"] == "h200-sxm"
    slower = lent["engine"]["op_scale"]
    assert slower["ffn_ln1"] == slower["attn_prefill"] == pytest.approx(1.184, abs=1e-3)
    assert "attn_decode" not in slower and "all_reduce" not in slower  # memory and links
    pytorch = scenario_of(run_of(other_flags='{"cuda_graph_padding_enabled": true}'), trace)
    assert not pytorch["policy"]["disable_overlap_scheduler"]
    assert pytorch["engine"] == {"frontend_s": 0.0}
    changes = {"gpu": "B200", "measurement_weight_type": "fp4", "tp": "4", "kv_precision": ""}
    other = scenario_of(run_of(scenario="Interactive", **changes), trace)
    assert (other["dtype"], other["kv_cache_dtype"]) == ("nvfp4", "fp8")
    assert (other["cluster"]["replicas"], other["cluster"]["router"]) == (2, "round_robin")
    flags = '{"block-size": 16, "long-prefill-token-threshold": 256}'
    changes = {"engine": "vLLM", "engine_version": "0.10.0", "kv_precision": "auto"}
    vllm = scenario_of(run_of(other_flags=flags, tokens_per_block="", **changes), trace)
    assert scenario_of(run_of(**changes | {"engine_version": ""}), trace)["stack"] == "vllm"
    assert (vllm["stack"], vllm["kv_cache_dtype"]) == ("vllm@0.10.0", "bf16")
    assert vllm["policy"]["long_prefill_token_threshold"] == 256
    assert vllm["kv_cache"]["block_size"] == 16
    assert vllm["kv_cache"]["gpu_memory_utilization"] == 0.9
    check_scenario(vllm, Source("mlperf", "a", {}, ()))


def test_each_gpu_of_a_run_with_attention_in_parallel_is_a_rank() -> None:
    """What the run's flags leave out has the harness's defaults."""
    flags = '{"cuda_graph_padding_enabled": true, "adp_balancing_batching_wait_iters": 2}'
    changes = {"model": "deepseek-r1", "gpu": "B200", "measurement_weight_type": "fp4"}
    run = run_of(attention_dp="1", tp="8", ep="8", other_flags=flags, **changes)
    found = scenario_of(run, Path("trace.csv"))
    assert found["cluster"] == {
        "tp": 1, "dp": 8, "pp": 1, "replicas": 1, "router": "least_requests", "max_length": 2048,
        "rank_router": "least_prompt_tokens", "expert_parallel": True,
    }  # fmt: skip
    policy = found["policy"]
    assert policy["enable_balance"] and policy["timeout_iters"] == 500
    assert policy["batching_wait_iters"] == 2 and policy["max_batch_size"] == 2048
    check_scenario(found, Source("mlperf", "a", {}, ()))
    whole = scenario_of(run_of(tp="8", ep="8", **changes), Path("trace.csv"))
    assert "enable_balance" not in whole["policy"] and "dp" not in whole["cluster"]


def test_what_has_no_scenario_is_refused_with_the_reason() -> None:
    for cells, reason in (
        ({"tp": "", "pp": ""}, "published no settings"),
        ({"gpu": "GB300"}, "gpu GB300: has no tables; known: B200,"),
        ({"engine": "Other"}, "engine Other: has no tables"),
        ({"model": "other"}, "model other: not modelled"),
        ({"tp": "3"}, "n_gpus 8: no multiple of tp x pp, 3"),
    ):
        with pytest.raises(UserError, match=reason):
            scenario_of(run_of(**cells), Path("trace.csv"))


@pytest.fixture(scope="module")
def runs() -> list[MlperfRun]:
    """Those of MLPerf's table."""
    if not SHARED.is_dir():
        pytest.skip("needs MLPerf's table")
    found, refused = read_tables([SHARED / "mlperf_dev.csv"], MlperfRun)
    assert len(found) == 78 and not refused
    return found


def test_all_runs_have_the_logs_schedules_and_most_a_scenario(runs: list[MlperfRun]) -> None:
    """The logs' times are rounded to 0.1 s. Runs of two GPUs without tables and four without
    settings have no scenario."""
    why = Counter[str]()
    for run in runs:
        gaps = mlperf.gaps_ns(run.schedule_rng_seed, run.target_rate_per_s, run.n_queries)
        total = gaps.sum() / 1e9
        assert total == pytest.approx(run.schedule_duration_s, abs=0.0501), run.id
        try:
            check_scenario(scenario_of(run, Path("trace.csv")), Source("mlperf", run.id, {}, ()))
        except UserError as error:
            why[str(error).split(":")[0]] += 1
    assert why == {"gpu GB300": 2, "the submitter published no settings": 4}


# Predictions ------------------------------------------------------------------------------------

SMALL = {"n_gpus": "1", "n_queries": "400", "target_rate_per_s": "8",
         "scheduled_samples_per_s": "8", "offline_samples_per_s": "20",
         "output_tokens_mean": "150"}  # fmt: skip
LIMITS = {"ttft_limit_ms": "450", "tpot_limit_ms": "60"}


def predicted(capacity: float, binds: str = "tpot", **latencies: float) -> PredictedRun:
    numbers = {key: (v, v / 2, 2 * v) for key, v in latencies.items()}
    band = (capacity, 0.9 * capacity, 1.1 * capacity)
    return PredictedRun({CAPACITY: band, **numbers}, binds)


def test_a_cell_has_the_medians_of_the_others() -> None:
    host = MlperfHost("", {"a": 1.0, "b": 2.0, "c": 6.0}, {"b": 0.5}, {})
    assert host.without("a") == (4.0, 0.5)
    assert host.without("b") == (3.5, 1.0)  # nobody else has messages
    assert host.without("new") == (2.0, 0.5)
    mixed = replace(host, errors={"h, dense": 0.1, "g, dense": 0.3, "h, mixtral-8x7b": 0.5})
    assert mixed.error_without("g, dense") == pytest.approx(0.1)
    assert mixed.error_without("new, dense") == pytest.approx(math.sqrt(0.05))
    assert mixed.error_without("g, mixtral-8x7b") == pytest.approx(0.5)
    assert mixed.error_without("h, mixtral-8x7b") == pytest.approx(math.sqrt(0.05))


def test_what_a_capacity_is_held_to() -> None:
    """A run that stopped at a limit says what its capacity is, others give a bracket."""
    at_limit = run_of(id="limit", tpot_ms_p99="192")
    free = run_of(id="free", tpot_ms_p99="100", n_gpus="4")
    assert (at_limit.binds, at_limit.stresses["tpot"]) == ("tpot", 0.96)
    best = {"limit": predicted(110.2), "free": predicted(110.2)}
    errors = mlperf.errors_of_cells(best, [at_limit, free])
    assert errors["H200-SXM x 8, llama2-70b"] == pytest.approx(math.log(110.2 / 100.1))
    assert errors["H200-SXM x 4, llama2-70b"] == 0  # from 100.1 to 119
    above = mlperf.errors_of_cells({"free": predicted(130)}, [free])
    assert above["H200-SXM x 4, llama2-70b"] == pytest.approx(math.log(130 / 119))
    latencies = {key: getattr(free, key) for key in LATENCIES}
    best = {id: predicted(one.capacity, **latencies) for id, one in best.items()}
    host = MlperfHost("", {}, {}, {})
    said = mlperf.ScoredMlperf([at_limit, free], best, {"x": "why"}, host).content()
    assert said["mlperf"]["rows"] == 3 and said["mlperf"]["answered"] == 2
    stopped = {"rows": 1, "within": 0, "same_limit": 1, "in_90": 1}
    assert said["mlperf"]["stopped_at_a_limit"] == stopped
    assert said["mlperf"]["proven"] == {"rows": 1, "within": 1}
    assert said["mlperf"]["latencies"]["all but 8B"]["ttft_ms_mean"]["mape"] == 0


def option_of(folder: Path, **cells: str) -> mlperf.LoadGenOption:
    lengths(folder, "llama2-70b")
    run = run_of(**{**SMALL, **cells})
    trace = folder / "trace.csv"
    found = requests_of(run, folder)
    rows = zip(schedule_s(run).tolist(), found.prompt, found.output, strict=True)
    lines = (f"{at!r},{prompt},{output}" for at, prompt, output in rows)
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    source = Source("mlperf", "a", {}, ())
    return mlperf.option_of(run, deploy(check_scenario(scenario_of(run, trace), source), source))


def test_another_load_has_the_same_requests_and_gaps_stretched(tmp_path: Path) -> None:
    option = option_of(tmp_path, n_gpus="2", scenario="Interactive", n_queries="40")
    source = Source("mlperf", "a", {}, ())
    rate = option.natural_rate
    for times, requests in ((1.0, 40), (2.5, 30)):
        found = option.at(Probe(times * rate, 0, requests), "rate")
        assert found.scenario.cluster.replicas == 2  # also behind a round-robin router
        built = deploy(found.scenario, source).requests
        own = option.deployment.requests[:requests]
        assert [one.prompt_tokens for one in built] == [one.prompt_tokens for one in own]
        arrivals = [times * one.arrival_s for one in built]
        assert arrivals == pytest.approx([one.arrival_s for one in own], abs=1e-9)


def times_of(option: mlperf.LoadGenOption) -> dict[str, float]:
    """Mean and P99 in ms by column, of one simulation."""
    columns = Analysis(option.deployment.simulate()).request_columns
    of = {"mean": np.nanmean, "p99": lambda times: np.nanpercentile(times, 99)}
    return {key: 1e3 * float(of[how](columns[name])) for key, (name, how) in LATENCIES.items()}


@pytest.mark.slow
def test_constants_come_from_other_systems_and_the_capacity_is_carried(tmp_path: Path) -> None:
    """Two systems whose iterations wait 7 ms for their host, which a fit finds; each is predicted
    with what the other says."""
    rows = []
    for id, gpus in (("one", 1), ("two", 2)):
        rates = {"target_rate_per_s": 8, "scheduled_samples_per_s": 8, "offline_samples_per_s": 20}
        cells = {**SMALL, "id": id, "n_gpus": str(gpus), "scenario": "Interactive", **LIMITS}
        cells |= {key: str(gpus * rate) for key, rate in rates.items()}
        truth = with_host(option_of(tmp_path, **cells), 0.007, 1.0)
        rows.append(cells | {key: f"{value:.6g}" for key, value in times_of(truth).items()})
    table = write_table(tmp_path / "runs.csv", *rows)
    found = mlperf.score_mlperf([table], tmp_path, InProcess(), silent, silent, fit=True)
    assert not found.refused
    assert list(found.host.host_iteration_s.values()) == pytest.approx([0.007, 0.007], rel=0.02)
    found.write(tmp_path)
    kept = pd.read_csv(tmp_path / mlperf.CAPACITIES)
    assert list(kept["id"]) == [run.id for run in found.runs if run.stopped]
    assert "half_width" in (tmp_path / "capacity_error.yaml").read_text()
    for run in found.runs:
        best = found.best[run.id]
        for key in LATENCIES:
            assert best.numbers[key][0] == pytest.approx(getattr(run, key), rel=0.03)
        # An independent run: at the capacity the limits hold, and 6 % above one breaks.
        option = option_of(tmp_path, **next(row for row in rows if row["id"] == run.id))
        option = with_host(option, 0.007, 1.0)
        for over, holds in ((0.97, True), (1.06, False)):
            deployment = option.at(Probe(over * best.capacity, 0, 400), "rate")
            again = deploy(deployment.scenario, Source("mlperf", "a", {}, ()))
            times = times_of(replace(option, deployment=again))
            stresses = (times["ttft_ms_p99"] / run.ttft_limit_ms,
                        times["tpot_ms_p99"] / run.tpot_limit_ms)  # fmt: skip
            assert (max(stresses) <= 1) == holds
        assert all(low <= value <= high for value, low, high in best.numbers.values())


@pytest.mark.slow
def test_the_command_writes_every_run_and_reason(tmp_path: Path) -> None:
    lengths(tmp_path, "llama2-70b")
    table = write_table(tmp_path / "runs.csv", SMALL | LIMITS, {"id": "none", "tp": "", "pp": ""})
    out = tmp_path / "S"
    asked = f"lab score {table} --lengths {tmp_path} --out {out} --workers 1 --json"
    content = json.loads(called(*asked.split()).stdout)
    assert content["question"].startswith("What rate do MLPerf's")
    assert content["mlperf"]["rows"] == 2
    header, *lines = (out / "predictions.csv").read_text().splitlines()
    columns = [f"{n}{end}" for n in (CAPACITY, *LATENCIES) for end in ("", "_low", "_high")]
    assert header.split(",") == ["id", *columns, "reason"]
    assert lines[0].startswith("a,") and lines[1].startswith("none,,")
    assert lines[1].endswith("the submitter published no settings")
    assert (out / "figures" / "capacity.png").is_file()


def test_lengths_go_with_tables_of_mlperf_alone(tmp_path: Path) -> None:
    done = called("lab", "score", "x.csv", "--lengths", tmp_path, "--peer", "p.csv", code=2)
    assert "--peer does not go with --lengths" in done.output
    table = write_table(tmp_path / "runs.csv", {})
    with pytest.raises(UserError, match="the id a is in an earlier file, too"):
        mlperf.score_mlperf([table, table], tmp_path, InProcess(), silent, silent)


def test_the_shipped_constant_is_the_median_of_the_cells() -> None:
    executor = host_times().executors["tensorrt"]
    host_s = mlperf.mlperf_host().without()[0]
    assert executor["host_iteration_s"] == pytest.approx(host_s, abs=5e-5)
    assert set(executor) == {"host_iteration_s", "host_sequence_s", "frontend_s"}


def of_cells(**predicted: list[float]) -> pd.DataFrame:
    """Runs by cell, each with a rate of 1 request/s and these logarithms of predictions."""
    rows = [(cell, math.exp(log)) for cell, logs in predicted.items() for log in logs]
    cells, capacities = zip(*rows, strict=True)
    return pd.DataFrame({"cell": cells, "measured_per_s": 1.0, "predicted_per_s": capacities})


def test_an_error_of_capacities_covers_cells_that_were_left_out() -> None:
    """Of n errors the ceil(0.9 (n + 1))-th smallest: of 19 the 18th, of 9 the largest."""
    tenths = [n / 100 for n in range(1, 10)]
    rows = of_cells(a=tenths, b=[-0.2, 0.5] + [0.0] * 8, **{"c, mixtral-8x7b": [0.9]})
    assert mlperf.half_widths(rows) == pytest.approx({"dense": 0.2, "mixture": 0.5})
    # Without b the half-width is a's largest, 0.09; without a the 10 of b have their largest, 0.5.
    # The mixture has the 18th of the others.
    held = mlperf.within_error(rows)
    assert held == [True] * 9 + [False, False] + [True] * 8 + [False]


def test_the_shipped_error_of_capacities_is_that_of_the_recorded_runs() -> None:
    rows, shipped = pd.read_csv(data_dir() / "lab" / mlperf.CAPACITIES), shipped_error()
    again = mlperf.fitted_error(rows)
    assert again == replace(shipped, date=again.date, half_width=again.half_width)
    assert again.half_width == pytest.approx(shipped.half_width)
    dense = rows[[not mlperf.is_mixture(cell) for cell in rows["cell"]]]
    errors = sorted(abs(math.log(p / m)) for m, p in dense.iloc[:, 2:].to_numpy())
    assert (len(rows), len(errors)) == (35, 31)
    assert shipped.half_width["dense"] == pytest.approx(errors[math.ceil(0.9 * 32) - 1])
    # Each run with a half-width that its own system did not see, of at most 25 %.
    held = 0
    for cell, measured, predicted in rows.iloc[:, 1:].to_numpy():
        half = mlperf.half_widths(rows[rows["cell"] != cell])
        widest = half["mixture" if mlperf.is_mixture(cell) else "dense"]
        assert math.expm1(widest) <= 0.25
        held += math.exp(-widest) <= measured / predicted <= math.exp(widest)
    assert held == shipped.inside >= 29 / 34 * len(rows)
