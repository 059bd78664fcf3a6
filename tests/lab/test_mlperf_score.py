"""MLPerf's runs predicted: capacities, latencies, bands and constants of other systems."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.capacity.search import Probe
from sarathi_sim.experiments.cli import app
from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.inputs import host_times
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.lab.servers.mlperf import (
    CAPACITY,
    LATENCIES,
    Banded,
    LoadGenOption,
    MlperfHost,
    PredictedRun,
    ScoredMlperf,
    errors_of_cells,
    mlperf_host,
    requests_of,
    scenario_of,
    schedule_s,
    score_mlperf,
)
from sarathi_sim.experiments.lab.servers.mlperf import (
    option_of as option_of_run,
)
from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metrics import Analysis
from tests.lab.test_mlperf import ROW, lengths, run_of

pytestmark = pytest.mark.lab

SMALL = {"n_gpus": "1", "n_queries": "400", "target_rate_per_s": "8",
         "scheduled_samples_per_s": "8", "offline_samples_per_s": "20",
         "output_tokens_mean": "150"}  # fmt: skip


def predicted(capacity: float, binds: str = "tpot", **latencies: float) -> PredictedRun:
    numbers = {key: Banded(v, v / 2, 2 * v) for key, v in latencies.items()}
    band = Banded(capacity, 0.9 * capacity, 1.1 * capacity)
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
    assert (at_limit.binds, at_limit.stress) == ("tpot", 0.96)
    best = {"limit": predicted(110.2), "free": predicted(110.2)}
    errors = errors_of_cells(best, [at_limit, free])
    assert errors["H200-SXM x 8, llama2-70b"] == pytest.approx(math.log(110.2 / 100.1))
    assert errors["H200-SXM x 4, llama2-70b"] == 0  # from 100.1 to 119
    above = errors_of_cells({"free": predicted(130)}, [free])
    assert above["H200-SXM x 4, llama2-70b"] == pytest.approx(math.log(130 / 119))
    latencies = {key: getattr(free, key) for key in LATENCIES}
    best = {id: predicted(one.capacity, **latencies) for id, one in best.items()}
    said = ScoredMlperf([at_limit, free], best, {"x": "why"}, MlperfHost("", {}, {}, {})).content()
    assert said["mlperf"]["rows"] == 3 and said["mlperf"]["answered"] == 2
    assert said["mlperf"]["stopped_at_a_limit"] == {"rows": 1, "within": 0, "same_limit": 1}
    assert said["mlperf"]["proven"] == {"rows": 1, "within": 1}
    assert said["mlperf"]["latencies"]["all but 8B"]["ttft_ms_mean"]["mape"] == 0


def option_of(folder: Path, **cells: str) -> LoadGenOption:
    lengths(folder, "llama2-70b")
    run = run_of(**{**SMALL, **cells})
    trace = folder / "trace.csv"
    found = requests_of(run, folder)
    rows = zip(schedule_s(run).tolist(), found.prompt, found.output, strict=True)
    lines = (f"{at!r},{prompt},{output}" for at, prompt, output in rows)
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    source = Source("mlperf", "a", {}, ())
    return option_of_run(run, deploy(check_scenario(scenario_of(run, trace), source), source))


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


def times_of(option: LoadGenOption) -> dict[str, float]:
    """Mean and P99 in ms by column, of one simulation."""
    columns = Analysis(option.deployment.simulate()).request_columns
    return {
        key: 1e3
        * float(
            np.nanmean(columns[name])
            if statistic == "mean"
            else np.nanpercentile(columns[name], 99)
        )
        for key, (name, statistic) in LATENCIES.items()
    }


def write_table(path: Path, *rows: dict[str, str]) -> Path:
    lines = [",".join(ROW), *(",".join({**ROW, **row}.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_constants_come_from_other_systems_and_the_capacity_is_carried(tmp_path: Path) -> None:
    """Two systems whose iterations wait 7 ms for their host, which a fit finds; each is predicted
    with what the other says."""
    rows = []
    for id, gpus in (("one", "1"), ("two", "2")):
        rate = str(8 * int(gpus))
        cells = {**SMALL, "id": id, "n_gpus": gpus, "scenario": "Interactive",
                 "target_rate_per_s": rate, "scheduled_samples_per_s": rate,
                 "offline_samples_per_s": str(20 * int(gpus)), "ttft_limit_ms": "450",
                 "tpot_limit_ms": "60"}  # fmt: skip
        truth = option_of(tmp_path, **cells).with_host(0.007, 1.0)
        rows.append(cells | {key: f"{value:.6g}" for key, value in times_of(truth).items()})
    table = write_table(tmp_path / "runs.csv", *rows)
    found = score_mlperf([table], tmp_path, InProcess(), silent, silent, fit=True)
    assert not found.refused
    assert list(found.host.host_iteration_s.values()) == pytest.approx([0.007, 0.007], rel=0.02)
    for run in found.runs:
        best = found.best[run.id]
        for key in LATENCIES:
            assert best.numbers[key].value == pytest.approx(getattr(run, key), rel=0.03)
        # An independent run: at the capacity the limits hold, and 6 % above one breaks.
        option = option_of(tmp_path, **next(row for row in rows if row["id"] == run.id))
        option = option.with_host(0.007, 1.0)
        for over, holds in ((0.97, True), (1.06, False)):
            deployment = option.at(Probe(over * best.capacity, 0, 400), "rate")
            again = deploy(deployment.scenario, Source("mlperf", "a", {}, ()))
            times = times_of(replace(option, deployment=again))
            kept = (
                times["ttft_ms_p99"] <= run.ttft_limit_ms
                and times["tpot_ms_p99"] <= run.tpot_limit_ms
            )
            assert kept == holds
        bands = best.numbers.values()
        assert all(each.low <= each.value <= each.high for each in bands)


@pytest.mark.slow
def test_the_command_writes_every_run_and_reason(tmp_path: Path) -> None:
    lengths(tmp_path, "llama2-70b")
    run = {**SMALL, "ttft_limit_ms": "450", "tpot_limit_ms": "60"}
    table = write_table(tmp_path / "runs.csv", run, {"id": "none", "tp": "", "pp": ""})
    out = tmp_path / "S"
    asked = ["score", str(table), "--lengths", str(tmp_path), "--out", str(out), "--workers", "1"]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (
        content["question"].startswith("What rate do MLPerf's") and content["mlperf"]["rows"] == 2
    )
    header, *lines = (out / "predictions.csv").read_text().splitlines()
    names = [CAPACITY, *LATENCIES]
    assert header.split(",") == [
        "id", *(f"{n}{end}" for n in names for end in ("", "_low", "_high")), "reason"
    ]  # fmt: skip
    assert lines[0].startswith("a,") and lines[1].startswith("none,,")
    assert lines[1].endswith("the submitter published no settings")
    assert (out / "figures" / "capacity.png").is_file()


def test_lengths_go_with_tables_of_mlperf_alone(tmp_path: Path) -> None:
    asked = ["score", "x.csv", "--lengths", str(tmp_path), "--peer", "p.csv"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code != 0 and "--lengths goes with MLPerf's tables alone" in result.output
    table = write_table(tmp_path / "runs.csv", {})
    with pytest.raises(UserError, match="the id a is in an earlier file, too"):
        score_mlperf([table, table], tmp_path, InProcess(), silent, silent)


def test_the_shipped_constant_is_the_median_of_the_cells() -> None:
    executor = host_times().executors["tensorrt"]
    assert executor["host_iteration_s"] == pytest.approx(mlperf_host().without()[0], abs=5e-5)
    assert set(executor) == {"host_iteration_s", "host_sequence_s", "frontend_s"}
