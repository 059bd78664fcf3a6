"""What a validation says of an engine whose every time is known; ``lab validate`` end to end."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import yaml

from sarathi_sim.experiments.config.loading import Experiment, load_experiment
from sarathi_sim.experiments.config.scenario import Validation
from sarathi_sim.experiments.lab.engines import session as se
from sarathi_sim.experiments.lab.engines import validation as va
from sarathi_sim.experiments.lab.engines.cells import Cell, engine_spec, grid_of, make_cells
from sarathi_sim.experiments.lab.servers.answers import validation_answer
from sarathi_sim.experiments.report.section import write_section
from sarathi_sim.experiments.report.sections import sections_of
from sarathi_sim.experiments.results import to_json
from sarathi_sim.policies.catalogue import build
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.bundle.schema import bundle_path, load_bundle, write_bundle
from sarathi_sim.profiler.engine.driver import Decision, Served
from sarathi_sim.profiler.engine.processes import EngineRun, StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS, EngineSpec, GridWork
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import called, refused
from tests.lab.fake_engine import SEND_S, TURNAROUND_S, FakeEngine

pytestmark = pytest.mark.lab
CONFIG: dict[str, Any] = {
    "name": "fake",
    "model": "tiny-llama-40m",
    "device": "cpu",
    "workload": {"requests": 12, "lengths": {"kind": "uniform", "min": 20, "max": 100},
                 "pd_ratio": 4},
    "cluster": {"max_length": 100, "pp": 2},
    "batching": {"max_batch": 4, "formation": "lazy"},
    "scenarios": {
        "orca": {"policy": {"name": "orca"}},
        "sarathi": {"policy": {"name": "sarathi", "chunk_size": 32, "tile": 8}},
        "online": {"policy": {"name": "orca"},
                   "workload": {"arrivals": {"kind": "poisson", "rate": 50.0}}},
    },
    "compare": {"bubble": {"metric": "bubble_s.mean", "over": ["orca", "sarathi"]}},
}  # fmt: skip

RECORDED = Path(__file__).parent / "recorded"


def load(tmp_path: Path, *assignments: str, **changes: Any) -> Experiment:
    path = tmp_path / "fake.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes))
    return load_experiment(path, assignments)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return load(tmp_path)


def cell_of(experiment: Experiment, name: str = "orca") -> Cell:
    return next(cell for cell in make_cells(experiment) if cell.name == name)


@pytest.mark.parametrize("name", ["orca", "sarathi", "online"])
def test_a_measured_run_reads_like_the_simulated_one(experiment: Experiment, name: str) -> None:
    """All metrics from the engine's log are those of the simulation it was made from."""
    cell = cell_of(experiment, name)
    requests = cell.requests()
    run, simulated = FakeEngine(cell).serve(requests)
    measured = se.totals(se.measured_records(run, requests, cell.scheduler()))
    assert measured == pytest.approx(se.totals(simulated), rel=1e-9)
    stages = (measured["bubble_stage0"], measured["bubble_stage1"])
    assert measured["bubble"] == pytest.approx(sum(stages))
    assert measured["bubble"] > 0
    again = se.totals(se.replay(run, requests, cell.scheduler()))
    assert again == pytest.approx(measured, rel=1e-6)
    assert se.lockstep(run, requests, cell.scheduler()) is None


def test_links_are_those_of_awaited_messages(tmp_path: Path) -> None:
    """The last stage is three times as slow as the first, and most messages wait for it."""
    uneven = {"max_length": 100, "pp": 2, "layers_per_stage": [2, 6]}
    cell = cell_of(load(tmp_path, cluster=uneven))
    found = se.links(FakeEngine(cell).serve(cell.requests())[0])
    assert found.sends == pytest.approx([SEND_S])
    assert found.turnaround_s == pytest.approx(TURNAROUND_S)


def test_lockstep_sees_what_is_off(experiment: Experiment) -> None:
    """An arrival on the other side of a decision is another batch, or a batch at another time; and
    had results been handled later, their requests' decisions could not have been made."""
    cell = cell_of(experiment, "online")
    requests = cell.requests()
    run, _ = FakeEngine(cell).serve(requests)
    late = [replace(r, arrival_s=r.arrival_s + 0.02) for r in requests]
    assert se.lockstep(run, late, cell.scheduler()) is not None
    later = [replace(one, returned_s=one.returned_s + 0.01) for one in run.served.decisions]
    handled = replace(run, served=replace(run.served, decisions=later))
    assert se.lockstep(handled, requests, cell.scheduler()) is not None
    run.served.decisions[3].decodes.append(99)
    assert str(se.lockstep(run, requests, cell.scheduler())).startswith("batch 3: engine")


def session(
    experiment: Experiment,
    *,
    repeats: int = 3,
    factor: float = 1.0,
    offset_s: float = 0.0,
    pp: int = 2,
) -> se.Session:
    """``factor`` and ``offset_s``: how much slower serving is than the grid says."""
    cells = [cell for cell in make_cells(experiment) if cell.layout == (pp, 1)]
    offline = [cell for cell in cells if not cell.online]
    spec, works = engine_spec(cells), grid_of(cells)
    grid = FakeEngine(cells[0]).play(works)
    found = []
    for number in range(repeats):
        served: dict[str, se.CellRuns] = {}
        for cell in offline:
            engine = FakeEngine(cell, factor, offset_s)
            around = [cell.requests(100 + 2 * number + i, 6) for i in range(2)]
            calibration = [(engine.serve(some)[0], some) for some in around]
            served[cell.name] = engine.serve(cell.requests())[0], calibration
        found.append(se.Repeat((grid, grid), served, 0.5))
    online = {c.name: FakeEngine(c).serve(c.requests())[0] for c in cells if c.online}
    return se.Session(cells, found, online, 1.0, {"engine": {"torch": "none"}}, spec, works)


def outcomes_of(*measured: se.Session) -> va.Comparisons:
    return va.evaluate_all(measured, lambda *_: None)


def test_an_engine_that_does_what_its_grid_says_is_predicted(experiment: Experiment) -> None:
    """The grid's points lie on the formula, which is linear: what lies between is exact too."""
    measured = session(experiment, repeats=1)
    for name in ("orca", "sarathi"):
        outcome = measured.evaluate(measured.repeats[0], cell_of(experiment, name))
        for prediction in ("grid", "calibrated"):
            assert np.median(va.iteration_errors(outcome, prediction)) < 0.005
            assert va.iteration_errors(outcome, prediction).max() < 0.02
            whole = outcome.whole[prediction]
            assert whole["makespan"] == pytest.approx(outcome.measured["makespan"], rel=5e-3)
            assert whole["bubble"] == pytest.approx(outcome.measured["bubble"], rel=0.03)


def test_a_profile_of_single_ops_predicts_too(tmp_path: Path, experiment: Experiment) -> None:
    """The grid's own bundle, as if ``profile`` had written it: both say the same."""
    measured = session(experiment, repeats=1)
    spec, repeat = measured.spec, measured.repeats[0]
    bundle = se.in_situ_bundle(spec, 2 * measured.works, repeat.grids, SEND_S, "my-cpu")
    known = {"processor": "a CPU"}
    bundle = replace(bundle, meta=replace(bundle.meta, environment=known))
    assert se.isolated_bundle(tmp_path, spec, known) is None
    write_bundle(bundle, bundle_path(tmp_path, "my-cpu", spec.model.name, spec.tp))
    assert se.isolated_bundle(tmp_path, spec, {"processor": "another"}) is None
    assert se.isolated_bundle(tmp_path, replace(spec, dtype="bfloat16"), known) is None
    found = se.isolated_bundle(tmp_path, spec, known)
    measured = replace(measured, isolated=found)
    outcomes = outcomes_of(measured)
    entry = va.report(experiment, [measured], outcomes)["cells"]["sarathi"]
    alone, grid = (entry[name]["makespan_error"]["median"] for name in ("isolated", "grid"))
    assert alone == pytest.approx(grid, abs=1e-3)
    assert "isolated_s" in va.iterations(outcomes)


def test_on_a_gpu_no_layer_is_faster_than_its_launch(experiment: Experiment) -> None:
    """Of a second, while the kernels take next to nothing: all layers wait for the host."""
    measured = session(experiment, repeats=1)
    played = (measured.spec, 2 * measured.works, measured.repeats[0].grids)
    bundle = se.in_situ_bundle(*played, SEND_S, "my-gpu")
    launch = pd.DataFrame({"what": ["layer_launch", "layer_run"], "time_us": [1e6, 5.0]})
    measured = replace(measured, isolated=replace(bundle, overhead=launch))
    cell = cell_of(experiment, "sarathi")
    assert "launched" not in measured.evaluate(measured.repeats[0], cell).iterations
    measured = replace(measured, spec=replace(measured.spec, device="cuda"))
    found = measured.evaluate(measured.repeats[0], cell).iterations
    beside = found["launched"] - sum(cell.layers)
    assert (beside > 0).all() and (beside < found["isolated"]).all()


def test_calibration_finds_what_serving_adds(experiment: Experiment) -> None:
    measured = session(experiment, repeats=1, factor=1.25, offset_s=1e-3)
    outcome = measured.evaluate(measured.repeats[0], cell_of(experiment))
    assert np.median(va.iteration_errors(outcome, "grid")) > 0.2
    assert va.iteration_errors(outcome, "calibrated").max() < 0.01
    makespan = outcome.whole["calibrated"]["makespan"]
    assert makespan == pytest.approx(outcome.measured["makespan"], rel=5e-3)


def test_the_noise_floor_is_the_median_over_pairs_of_repeats() -> None:
    one, two = np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.6, 5.0])
    # 1/1 - 1 = 0, 2/1.6 - 1 = 0.25, 4/5 - 1 = -0.2
    assert va.noise_floor([one, two]) == pytest.approx(0.2)
    assert np.isnan(va.noise_floor([one]))
    assert np.isnan(va.noise_floor([one, two[:2]]))


def test_gates_reject_what_the_machine_spoilt(experiment: Experiment) -> None:
    measured = session(experiment, repeats=1)
    repeat = measured.repeats[0]
    outcomes = outcomes_of(measured)
    assert va.rejected(measured, outcomes) == {}
    grid = repeat.grids[0]

    def drifted(factor: float) -> se.Session:
        moved = replace(grid, finish=grid.start + factor * (grid.finish - grid.start))
        return replace(measured, repeats=[replace(repeat, grids=(grid, moved))])

    for factor in (1.06, 0.94):
        said = f"the grid took {factor} times as long after as before"
        assert va.rejected(drifted(factor), outcomes) == {0: said}
    (orca,) = outcomes["orca"]
    lost = orca.lost | {"iteration_error_median": 0.026}
    preempted = {**outcomes, "orca": [replace(orca, lost=lost)]}
    why = "preempted work accounts for 2.6% of iteration_error_median, and 2.50% is allowed"
    assert va.rejected(measured, preempted) == {0: why}
    assert va.rejected(drifted(1.06), preempted) == {
        0: f"the grid took 1.06 times as long after as before; {why}"
    }


def test_the_report_holds_what_was_promised(experiment: Experiment, tmp_path: Path) -> None:
    measured = [session(experiment)]
    outcomes = outcomes_of(*measured)
    result = va.report(experiment, measured, outcomes)
    assert result["quiet"]
    orca, ratio = result["cells"]["orca"], result["ratios"]["bubble"]
    for key in (*se.TARGETS, "throughput_error"):
        assert set(orca[key]) == {"median", "min", "max"}
    assert len(orca["grid"]["repeats"]) == 3
    assert orca["parity"] == result["cells"]["online"]["parity"] == 1.0
    assert (orca["pp"], orca["tp"], orca["online"], orca["noise_floor"]) == (2, 1, False, 0.0)
    assert set(orca["grid"]["by_kind"]) <= {"prefill", "decode", "mixed"}
    assert abs(ratio["error"]) < 0.05
    assert all(row["met"] for row in result["targets"])
    section = validation_answer(result)
    assert section.answer == "Batches are identical in 3 of 3 cells; all targets met."
    assert section.warnings == [] and len(section.tables[0].rows) > 8
    assert result["repeats"]["pp2_tp1"]["engine"] == {"torch": "none"}
    assert orca["scenario"]["workload"]["requests"] == 12
    (tmp_path / "validation.json").write_text(json.dumps(result, allow_nan=False))
    write_section(tmp_path, section)
    (shown,) = sections_of([tmp_path])
    assert shown.words() == section.words(), "what report puts on a page"
    assert shown.tables[0].rows == section.tables[0].rows


def restless(measured: se.Session) -> se.Session:
    """The first repeat's second grid took far longer than its first."""
    first, *others = measured.repeats
    slow = replace(first.grids[0], finish=first.grids[0].start + 2.0)
    return replace(measured, repeats=[replace(first, grids=(first.grids[0], slow)), *others])


def test_a_layout_is_judged_whatever_became_of_the_others(tmp_path: Path) -> None:
    """One stage: all repeats accepted, and a target missed. Two stages: too few accepted."""
    scenarios = CONFIG["scenarios"] | {
        "alone": {"policy": {"name": "orca"}, "cluster": {"max_length": 100, "pp": 1}}
    }
    ratio = {"metric": "makespan_s", "over": ["orca", "alone"]}
    experiment = load(tmp_path, scenarios=scenarios, compare={"stages": ratio})
    measured = [session(experiment, pp=1), restless(session(experiment))]
    outcomes = outcomes_of(*measured)
    for outcome in outcomes["alone"]:
        outcome.iterations["calibrated"] *= 1.06
    result = va.report(experiment, measured, outcomes)
    met = {(row["what"], row["cell"]): row["met"] for row in result["targets"]}
    assert met["iteration_error_median", "alone"] is False
    assert met["makespan_error", "alone"] is met["replay makespan", "alone"] is True
    assert met["makespan_error", "orca"] is met["makespan_error", "sarathi"] is None
    # Of a ratio over both layouts only the repeats count that both accepted.
    assert (result["ratios"]["stages"]["repeats"], met["ratio", "stages"]) == (2, None)
    section = validation_answer(result)
    said = section.warnings
    assert any(line.startswith("missed: iteration_error_median of alone is +6.") for line in said)
    assert [line.split(":")[0] for line in said if "not quiet" in line] == ["pp2_tp1"]
    assert section.answer.endswith(f"; 1 of {len(result['targets'])} targets are missed.")


def test_a_run_without_bubbles_has_no_bubble_error(experiment: Experiment) -> None:
    """A single iteration, say: minutes of measuring must not end in a division by zero."""
    measured = [session(experiment)]
    outcomes = outcomes_of(*measured)
    for outcome in (o for repeats in outcomes.values() for o in repeats):
        outcome.measured.update({k: 0.0 for k in outcome.measured if k.startswith("bubble")})
    result = to_json(va.report(experiment, measured, outcomes))
    assert result["cells"]["orca"]["bubble_error"]["median"] is None
    assert {row["what"] for row in result["targets"]}.isdisjoint({"bubble_error", "ratio"})
    assert "bubble" in result["ratios"] and len(validation_answer(result).tables[0].rows) > 8
    json.dumps(result, allow_nan=False)


ANSWERS, LATER = "sessions={max_turns: 2, think_s: 1}", "arrivals={kind: closed_loop, clients: 2}"
FREE = "batching.micro_batches=free", "scenarios={held: {policy: {name: request_level}}}"
PAGED = "batching={}", "scenarios={paged: {policy: {name: vllm}}}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["batching.formation=eager"], "batching.formation: value 'eager': must be lazy"),
        (["batching={formation: lazy}"], "batching.max_batch: this key is missing"),
        (["cluster.replicas=2"], "cluster.replicas: value 2: must be 1"),
        (["cluster.tp=3"], "cluster.tp: value 3: .*does not divide"),
        (["cluster.pp=9"], "cluster.pp: value 9: must be at most 8"),
        (["device=a6000"], "device: value 'a6000': must be cpu or cuda"),
        (["model=tiny-lama-40m"], "did you mean tiny-llama-40m"),
        (["engine.jitter=0.1"], "engine: value {'jitter': 0.1}: must be left out"),
        (["workload.too_long=reject"], "workload.too_long: value 'reject': must be error"),
        ([f"workload.{ANSWERS}"], "workload.sessions: value {.*: must be left out: only the simu"),
        ([f"workload.{LATER}"], "arrivals.kind: value 'closed_loop': needs clients that wait"),
        ([*FREE, "compare={}"], "micro_batches: value 'free': a policy that holds finished"),
        ([*PAGED, "compare={}"], "policy.name: value 'vllm': must be request_level, orca, sarathi"),
        (["kv_cache={block_size: 4}"], "kv_cache: value {.*}: must be left out: the engine's"),
    ],
)
def test_what_the_engine_cannot_do(tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_cells(load(tmp_path, *changes))


@pytest.mark.parametrize(
    ("config", "layouts", "gigabytes"),
    [("validate_cpu", {(1, 1), (2, 1)}, (0, 2)), ("validate_gpu", {(1, 1)}, (16, 0.9 * 24))],
)
def test_a_dry_run_checks_the_shipped_configurations(
    config: str, layouts: set[tuple[int, int]], gigabytes: tuple[float, float]
) -> None:
    experiment = va.load_validation(config)
    cells = make_cells(experiment)
    assert {cell.layout for cell in cells} == layouts
    one = [cell for cell in cells if cell.layout == (1, 1)]
    spec = engine_spec(one, experiment.validation.dtype)
    assert spec.device == ("cuda" if config == "validate_gpu" else "cpu")
    assert gigabytes[0] < spec.bytes_needed(0) / 1e9 < gigabytes[1], "what the file says"
    words = ("lab", "validate", config, "--dry-run")
    assert "sarathi" in called(*words).stdout
    assert "must be 1: one engine is run" in refused(*words, "--set", "cluster.replicas=2")


class CountedEngine(nullcontext[Any]):
    """In place of an engine's processes; ``log`` has what each was asked."""

    log: ClassVar[list[Any]] = []
    environment: ClassVar[dict[str, str]] = {"processor": "none"}

    def __init__(self, spec: EngineSpec, timeout_s: float) -> None:
        super().__init__(self)

    def play(self, works: list[GridWork]) -> str:
        self.log.append("grid")
        return "grid"

    def serve(self, requests: list[Request], policy: dict[str, Any], settings: Any) -> str:
        self.log.append((policy["name"], requests))
        return policy["name"]


def test_the_order_of_the_work(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up; then grid, calibration, workload and calibration of each cell, grid; what depends on
    the clock once at the end. The second repeat would end beyond the limit; the first is always
    run."""
    monkeypatch.setattr(se, "EngineProcesses", CountedEngine)
    monkeypatch.setattr(CountedEngine, "log", log := [])
    counted, said = list[tuple[int, int]](), list[str]()
    settings = Validation(repeats=2, calibration_requests=3)
    for limit_s, repeats in ((None, 2), (1e-9, 1)):
        log.clear()
        (found,) = se.run_sessions(
            make_cells(experiment), settings.model_copy(update={"limit_s": limit_s}),
            say=said.append, progress=lambda _, done, total: counted.append((done, total)),
        )  # fmt: skip
        assert len(found.repeats) == repeats and set(found.online) == {"online"}
        repeat = ["grid", *["orca"] * 3, *["sarathi"] * 3, "grid"]
        names = [one if one == "grid" else one[0] for one in log]
        assert names == ["grid", "orca", *repeats * repeat, "orca"]
        assert counted[-1] == (2, 2) and counted == sorted(counted)
        counted.clear()
        if repeats == 2:
            sizes = [len(one[1]) for one in log if one != "grid"]
            assert sizes == [3, *2 * [3, 12, 3, 3, 12, 3], 12]
            assert log[4][1] == log[12][1] == cell_of(experiment).requests()
            assert log[3][1] != log[11][1], "calibration has other seeds in each repeat"
    assert any(line.endswith("repeat 2 is left out: it could end after 1e-09 s") for line in said)


# What other work took of a run: by hand, and recorded on a quiet and a busy machine --------------


def largest_preempted(log: StageLog) -> None:
    took = (log.finish - log.start).sum(axis=1)
    log.cpu[np.argsort(took)[-int(0.08 * len(took)) :]] = 0.0


def half_all_reduce(log: StageLog) -> None:
    wall = log.finish - log.start
    log.ops[:, :, TIMED_OPS.index("all_reduce")] = wall / 2
    log.cpu[:] = wall / 2


def nine_tenths(log: StageLog) -> None:
    log.cpu[:] = 0.9 * (log.finish - log.start)


@pytest.mark.parametrize(
    ("change", "device", "share", "why"),
    [
        (lambda log: None, "cpu", 0.0, None),
        (nine_tenths, "cpu", 0.1, "accounts for 10.0% of iteration_error_median, and 2.50% is"),
        # Of a GPU's work the host's clock says nothing.
        (nine_tenths, "cuda", None, None),
        # Neither the median nor the 90th percentile shows the largest 8 %, but the makespan does.
        (largest_preempted, "cpu", 0.0, " of makespan_error, "),
        # In half of the time, all-reduce, the core has nothing to do.
        (half_all_reduce, "cpu", 0.0, None),
    ],
)
def test_lost_time_is_wall_time_less_cpu_time(
    experiment: Experiment, change: Any, device: str, share: float | None, why: str | None
) -> None:
    cell = cell_of(experiment)
    run, _ = FakeEngine(cell).serve(cell.requests())
    change(run.stages)
    found = se.lost(device, run, cell.requests(), cell.scheduler)
    for key in ("iteration_error_median", "iteration_error_p90"):
        assert np.isnan(found[key]) if share is None else found[key] == pytest.approx(share)
    said = se.too_much(found)
    assert said is None if why is None else why in str(said)
    if change is nine_tenths and device == "cpu":
        # All but links and returns would have been faster by that.
        assert -0.1 < found["makespan_error"] < -0.05


@pytest.mark.parametrize("name", se.TARGETS)
def test_half_of_each_target_may_be_lost(name: str) -> None:
    nothing = dict.fromkeys(se.TARGETS, 0.0)
    limit = se.MOST_OF_TARGET * se.TARGETS[name]
    assert se.too_much(nothing | {name: 0.99 * limit}) is None
    for share in (1.01 * limit, -1.01 * limit):
        why = se.too_much(nothing | {name: share})
        assert why is not None and f" of {name}, and {limit:.2%} is allowed" in why


def of_recorded(name: str) -> dict[str, float]:
    """Of a run of ``validate_cpu`` on two cores, as the engine logged it (times to 1 us)."""
    entry = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    times = {key: np.array(entry[key]) for key in ("arrived", "start", "finish", "cpu")}
    ops = np.zeros((*times["cpu"].shape, len(TIMED_OPS) + 2))
    decisions = [Decision(**one) for one in entry["decisions"]]
    run = EngineRun(Served(decisions=decisions), StageLog(**times, ops=ops))
    requests, policy = [Request(*one) for one in entry["requests"]], build(**entry["policy"])
    return se.lost("cpu", run, requests, lambda: MicroBatches(policy, **entry["settings"]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        # With real-time priority, so that nothing else ran beside it.
        ("orca_quiet", None),
        ("sarathi_quiet", None),
        # Beside ten other processes: the two ranks ran a seventh of the time.
        ("orca_busy", "88.8% of iteration_error_median"),
        ("sarathi_busy", "87.2% of iteration_error_median"),
        # Real-time priority, and the kernel took the core twice, for 50 ms each.
        ("sarathi_throttled", "9.6% of bubble_error"),
    ],
)
def test_a_run_that_had_its_cores_to_itself_is_accepted(name: str, why: str | None) -> None:
    found = of_recorded(name)
    if why is None:
        assert se.too_much(found) is None and found["iteration_error_median"] < 0.01
    else:
        assert why in str(se.too_much(found))


# The command, end to end on a tiny model --------------------------------------------------------

MODEL = {
    "name": "tiny", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "ffn_hidden_size": 128, "gated_ffn": True, "vocab_size": 96,
    "tied_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip


def config(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(MODEL))
    own = {"validation": {"repeats": 2, "calibration_requests": 4}}
    content = CONFIG | own | {"model": str(tmp_path / "tiny.yaml")}
    (path := tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    return path


@pytest.mark.slow
def test_validate_writes_its_report(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    out = tmp_path / "result"
    done = called("lab", "validate", config(tmp_path), "--out", out)
    result = json.loads((out / "validation.json").read_text())
    assert result["format"] == "sarathi-sim validation 1"
    same = {name: cell["parity"] for name, cell in result["cells"].items()}
    assert same == dict.fromkeys(("orca", "sarathi", "online"), 1.0)
    orca = result["cells"]["orca"]
    assert len(orca["calibrated"]["repeats"]) == result["repeats"]["pp2_tp1"]["run"] == 2
    assert orca["noise_floor"] > 0
    assert result["ratios"]["bubble"]["measured"]["median"] > 0
    for name in ("iterations", "timelines"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 10_000
    assert "Batches are identical in 3 of 3 cells" in done.stdout
    # It replaces its own result, and nothing else.
    again = refused("lab", "validate", config(tmp_path), "--out", tmp_path)
    assert "so it is not replaced" in again


METRIC = "compare.bubble.metric: value 'ttft_s.p50': a validation compares makespan_s"
REFUSED = {
    "--profiles=none": "the engine needs torch",
    "--realtime": "needs Linux, and root",
    "--set=compare.bubble.metric=ttft_s.p50": METRIC,
    "--set=validation.repeats=0": "validation.repeats: value 0: must be at least 1",
}


@pytest.mark.parametrize(("argument", "message"), REFUSED.items())
def test_what_cannot_be_validated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, message: str
) -> None:
    if "torch" in message:
        monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    out = tmp_path / "out"
    assert message in refused("lab", "validate", config(tmp_path), "--out", out, argument)
    assert not out.exists()


# The bundle of the grid --------------------------------------------------------------------------


WORKS: list[GridWork] = [
    ([], [(1, 10)]),
    ([], [(1, 10), (2, 30)]),
    ([(0, 64, 0, 1)], []),
    ([(0, 62, 0, 1)], [(1, 20), (2, 20)]),
]


def test_repeats_become_a_median_and_a_spread(tmp_path: Path) -> None:
    """Each op of the k-th work takes 10 (k + 1) us a layer, times 1, 1.2 and 1.8 in turn."""
    spec = EngineSpec(load_model("tiny-llama-40m"), (2,), 1, 4, 128, 64)
    factors = np.repeat([1.0, 1.2, 1.8], len(WORKS))
    base_s = np.tile(10e-6 * np.arange(1, len(WORKS) + 1), 3) * factors
    ops = np.zeros((len(factors), 1, len(TIMED_OPS) + 2))
    ops[:, 0, : len(TIMED_OPS)] = 2 * base_s[:, None]
    ops[:, 0, len(TIMED_OPS)] = 2 * 8 * base_s
    ops[:, 0, len(TIMED_OPS) + 1] = base_s
    start = np.zeros((len(factors), 1))
    finish = (17.5 * base_s)[:, None]
    log = StageLog(start, start, finish, finish, ops)
    bundle = se.in_situ_bundle(spec, 3 * WORKS, [log], 1e-4, "in-situ")
    write_bundle(bundle, tmp_path / "b")
    read = load_bundle(tmp_path / "b")
    # The quartiles of 1, 1.2 and 1.8 are 1.1 and 1.5.
    scatter = pytest.approx(100 * 0.4 / 1.2, abs=1e-3)
    for table, times in (("attn_decode", 12.0), ("attn_decode_skew", 24.0), ("attn_prefill", 36.0)):
        assert read.tables()[table]["time_us"].tolist() == pytest.approx([times])
        assert read.tables()[table]["spread_pct"].tolist() == [scatter]
    assert read.mixed["time_us"].tolist() == pytest.approx([8 * 48.0])
    assert read.mixed["spread_pct"].tolist() == [scatter]
    preproj = read.linear[read.linear["op"] == "preproj"].set_index("num_tokens")
    assert preproj.loc[1, "time_us"] == pytest.approx(12.0)
    assert preproj.loc[1, "spread_pct"] == scatter
    assert "spread_pct" not in read.send_recv  # one number for all sizes, as it is calibrated
