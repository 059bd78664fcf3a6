"""The engine in torch beside the simulator: its runs, its log in the simulator's terms, and
predictions of its times.

A repeat is a grid of synthetic work; for each cell a calibration, the workload and a calibration;
and a grid.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import groupby
from os import getloadavg
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.request import Sequence as Member
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.bundle import schema
from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.engine.driver import Decision, signature
from sarathi_sim.profiler.engine.processes import EngineProcesses, EngineRun, Facts, StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS, EngineSpec, GridWork
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, EDGE_OPS, OPS, OTHERS, PREFILL
from sarathi_sim.profiler.measuring.to_bundle import tables_of
from sarathi_sim.profiler.planning.grid import MIXED, SKEWED, Key, Timing, relative_iqr
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.loop.pipeline import nominal_times
from sarathi_sim.simulator.loop.records import (
    ITERATION_COLUMNS,
    Floats,
    Records,
    ReplicaLog,
    StageTimes,
    Switches,
)
from sarathi_sim.simulator.loop.simulation import Replicas, simulate
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.op_times.regression import bundle_times
from sarathi_sim.simulator.views.ledger import WAITS
from sarathi_sim.simulator.views.metrics import Analysis
from ...config.scenario import Validation
from .cells import Cell, engine_spec, grid_of
from .lockstep import play_back, records_of_one

TARGETS = {
    "iteration_error_median": 0.05,
    "iteration_error_p90": 0.15,
    "makespan_error": 0.05,
    "bubble_error": 0.10,
}
"""The allowed errors of a prediction; decided beforehand."""
MOST_OF_TARGET = 0.5
"""The part of a target that lost time may use up: half. If a prediction still misses the target,
its own error is larger than the machine's."""


_LAYERS, _HEAD = len(TIMED_OPS), len(TIMED_OPS) + 1


def in_situ_bundle(
    spec: EngineSpec, works: list[GridWork], grids: Sequence[StageLog], send_s: float, device: str
) -> Bundle:
    """The bundle of grids that were played one after the other; ``works`` may hold a micro-batch
    several times, which gives a median and a spread. ``send_s``: any transfer between stages."""
    parts = [vars(grid) for grid in grids]
    log = StageLog(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    # One layer of an op: the stages' sums, over all their layers.
    per_layer = log.ops[:, :, : _LAYERS + 1].sum(axis=1) / sum(spec.layers)
    first, last = (log.finish - log.start - log.ops[:, :, _LAYERS]).T[[0, -1]]
    if spec.pp == 1:
        last = log.ops[:, -1, _HEAD]
        first = first - last
    seconds = dict(zip((*TIMED_OPS, MIXED), per_layer.T, strict=True))
    seconds[SKEWED] = seconds[DECODE]
    seconds[ALL_REDUCE] = seconds[ALL_REDUCE] / OPS[ALL_REDUCE].calls
    seconds[OTHERS] = per_layer[:, _LAYERS] - per_layer[:, :_LAYERS].sum(axis=1)
    seconds |= dict(zip(EDGE_OPS, (first, last), strict=True))
    samples: dict[str, dict[Key, list[float]]] = {}
    for number, work in enumerate(works):
        for op, key in _keys(spec, *work).items():
            # A remainder that noise made negative is no time; a bundle's times are positive.
            time_us = max(1e6 * float(seconds[op][number]), 0.1)
            samples.setdefault(op, {}).setdefault(key, []).append(time_us)
    points = {
        op: {key: Timing(median(times), relative_iqr(times)) for key, times in by_size.items()}
        for op, by_size in samples.items()
    }
    sizes = {
        "num_bytes": [1, 2**30],
        "scope": "intra_node",
        "time_us": max(send_s * 1e6, 0.1),
    }
    send, today = pd.DataFrame(sizes), date.today().isoformat()
    notes = "measured in the running engine; edge ops hold all that a stage does beside layers"
    meta = schema.BundleMeta(
        device, spec.model.name, spec.model, spec.tp, "measured", today, "sarathi-sim validate",
        dtype=spec.dtype, num_layers_profiled=sum(spec.layers), notes=notes,
    )  # fmt: skip
    return Bundle(meta, **tables_of(points) | {"send_recv": send})


def _keys(
    spec: EngineSpec, chunks: list[tuple[int, int, int, int]], decodes: list[tuple[int, int]]
) -> dict[str, Key]:
    """What a work tells of each op: of its size for ops by rows; of attention where it has chunks
    or decodes alone (those of unequal contexts apart); of whole layers where it has both."""
    contexts = [context for _, context in decodes]
    tokens, outputs = sum(c[1] for c in chunks) + len(decodes), len(chunks) + len(decodes)
    keys: dict[str, Key] = {
        op: (outputs if OPS[op].outputs else tokens,) for op in spec.model.row_ops
    }
    if spec.tp > 1:
        size = 4 if spec.dtype == "float32" else 2
        keys[ALL_REDUCE] = (tokens * spec.model.hidden_size * size,)
    if chunks and decodes:
        keys[MIXED] = (*chunks[0][1:3], len(contexts), contexts[0])
    elif chunks:
        keys[PREFILL] = chunks[0][1:3]
    elif len(set(contexts)) == 1:
        keys[DECODE] = (len(contexts), contexts[0])
    else:
        keys[SKEWED] = (len(contexts), round(sum(contexts) / len(contexts)), max(contexts))
    return keys


def clocks(run: EngineRun) -> tuple[Floats, Floats]:
    """Of each decision: when it was made, and when its return had been handled."""
    made = run.served.decisions
    return np.array([one.clock_s for one in made]), np.array([one.returned_s for one in made])


def stage_times(run: EngineRun) -> StageTimes:
    """The busy times of every stage. The first one's work begins with the scheduler's decision."""
    start = run.stages.start.copy()
    start[:, 0] = clocks(run)[0]
    return StageTimes(start, run.stages.finish, run.stages.finish)


@dataclass(frozen=True)
class Links:
    """Median seconds around the stages' work: of each transfer to the next stage, shape
    (stages - 1,); from the last stage's finish until rank 0 had handled it; and for a decision,
    within the first stage's time."""

    sends: Floats
    turnaround_s: float
    decide_s: float

    @property
    def send_s(self) -> float:
        """The mean of all transfers; 0 without any."""
        return float(self.sends.mean()) if len(self.sends) else 0.0


def links(*runs: EngineRun) -> Links:
    """The links of runs. Only messages with a waiting receiver count: the others waited for a busy
    receiver."""
    sends, turnarounds = zip(*map(_sends_and_turnaround, runs), strict=True)
    decide = [run.stages.start[:, 0] - clocks(run)[0] for run in runs]
    turnaround_s, decide_s = (float(np.median(each)) for each in (turnarounds, np.hstack(decide)))
    return Links(np.median(sends, axis=0), turnaround_s, decide_s)


def _sends_and_turnaround(run: EngineRun) -> tuple[Floats, float]:
    finish, (clock, returned) = run.stages.finish, clocks(run)
    sends = []
    for stage in range(1, finish.shape[1]):
        idle = np.ones(len(finish), np.bool_)
        idle[1:] = finish[1:, stage - 1] > finish[:-1, stage]
        took = (run.stages.arrived[:, stage] - finish[:, stage - 1])[idle]
        # A message may arrive before the sender has logged the send.
        sends.append(max(0.0, float(np.median(took))))
    waits = returned - finish[:, -1]
    if sends:
        # The first stage's last work before the return was handled.
        idle = finish[:, -1] > finish[np.searchsorted(clock, returned) - 1, 0]
        waits = waits[idle if idle.any() else slice(None)]
    return np.array(sends), float(np.median(waits))


def measured_records(run: EngineRun, requests: Sequence[Request], scheduler: Scheduler) -> Records:
    """The run as the simulator would record it, so that the same metrics apply; ``scheduler`` has
    the sizes of the engine's."""
    served, times, around = run.served, stage_times(run), links(run)
    rows = [
        (d.group, len(d.chunks), sum(c[1] for c in d.chunks), sum(c[2] for c in d.chunks),
         len(d.decodes), d.decode_context, d.padding)
        for d in served.decisions
    ]  # fmt: skip
    names = ("group", "chunks", "prefill_tokens", "prefill_context", "decodes", "decode_context",
             "padding")  # fmt: skip
    columns = dict.fromkeys(ITERATION_COLUMNS, np.zeros(len(rows)))
    columns |= dict(zip(names, np.array(rows, float).reshape(-1, len(names)).T, strict=True))
    columns |= {"ready_s": times.start[:, 0].copy(), "finish_s": times.finish[:, -1].copy()}
    columns["send_s"] = np.full(len(rows), around.send_s)
    log = ReplicaLog(
        layers=(1,) * times.start.shape[1],
        switches=Switches(lazy=True, turnaround_s=around.turnaround_s),
        **{key: getattr(scheduler, key) for key in ("max_in_flight", "max_batch", "kv_capacity")},
        iterations=columns,
        spans=np.array(served.spans, np.int64).reshape(-1, 5),
        stage_s=times.finish - times.start,
        measured=times,
    )
    return records_of_one(requests, served.rejected, log)


def lockstep(run: EngineRun, requests: Sequence[Request], scheduler: Scheduler) -> str | None:
    """The first difference of the simulator's loop from the run, given the measured times and the
    clocks of the decisions; None if there is none. Each batch must be the same, and be formed at
    the same clock: by then its requests had returned or arrived in the simulation, too."""
    log, (clock, returned) = run.stages, clocks(run)
    # The times must add up to the whole time between a decision and its return.
    service = log.finish - np.column_stack([clock, log.arrived[:, 1:]])
    send = log.arrived[:, 1:] - log.finish[:, :-1]
    turnaround = returned - log.finish[:, -1]
    formed, records = play_back(requests, scheduler, service, send, turnaround, clock)
    if difference := first_difference(run.served.decisions, formed):
        return difference
    ready = records.replicas[0].iterations["ready_s"]
    late = np.flatnonzero(ready != quantize(clock)[: len(formed)])
    return f"batch {late[0]}: not formed when the engine did" if late.size else None


def first_difference(engine: Sequence[Decision], simulator: Sequence[Decision]) -> str | None:
    """The first batch that differs in anything but its times."""
    for number, (one, other) in enumerate(zip(engine, simulator, strict=False)):
        if signature(one) != signature(other):
            return f"batch {number}: engine {one}; simulator {other}"
    if len(engine) != len(simulator):
        return f"engine {len(engine)} batches; simulator {len(simulator)}"
    return None


def replay(
    run: EngineRun, requests: Sequence[Request], scheduler: Scheduler, less: Floats | float = 0.0
) -> Records:
    """The simulator's loop with the measured service times, ``less`` so many seconds, alone; links
    take their medians."""
    times, around = stage_times(run), links(run)
    service = times.finish - times.start - less
    send = np.broadcast_to(around.sends, (len(service), len(around.sends)))
    turnaround = np.full(len(service), around.turnaround_s)
    return play_back(requests, scheduler, service, send, turnaround)[1]


Totals = Mapping[str, float]
"""Numbers of a run, or their errors, by name."""


def totals(records: Records) -> dict[str, float]:
    """A run in totals: seconds, and tokens a second. Bubbles are the ledger's, with communication
    and turn-around; by stage if there is a pipeline."""
    analysis = Analysis(records)
    table = analysis.requests
    stages = analysis.ledger[[f"{name}_s" for name in WAITS]].sum(axis=1).tolist()
    tokens = int(records.prompt_tokens.sum() + records.output_tokens.sum())
    makespan = records.end_s - float(records.arrival_s.min())
    return {
        "makespan": makespan,
        "throughput": tokens / makespan,
        "ttft_p50": float(table["ttft_s"].quantile(0.5)),
        "ttft_p90": float(table["ttft_s"].quantile(0.9)),
        "bubble": sum(stages),
        "bubble_per_request": float(table["bubble_s"].mean()),
        **({f"bubble_stage{n}": s for n, s in enumerate(stages)} if len(stages) > 1 else {}),
    }


def ratio_of(above: float, below: float) -> float:
    """A ratio; NaN if the lower number is 0 (a run without bubbles, for example)."""
    return above / below if below else math.nan


def off(simulated: float, measured: float) -> float:
    """The relative error; NaN as a ratio is."""
    return ratio_of(simulated, measured) - 1


def total_errors(simulated: Totals, measured: Totals) -> dict[str, float]:
    """Relative errors of totals, signed; of bubbles only where there is a pipeline, else NaN."""
    alone = "bubble_stage1" not in measured
    return {
        f"{key}_error": math.nan
        if alone and key.startswith("bubble")
        else off(simulated[key], value)
        for key, value in measured.items()
    }


@dataclass(frozen=True)
class StageTimePrediction:
    """``offset_s + factor *`` the bundle's time of a stage; (0, 1) is the bundle alone. No layer
    takes less than ``launch_s``, in which the host launches its kernels one by one."""

    cell: Cell
    bundle: BundlePredictor
    links: Links
    offset_s: float = 0.0
    factor: float = 1.0
    launch_s: float = 0.0

    @staticmethod
    def of(cell: Cell, bundle: Bundle, links: Links) -> StageTimePrediction:
        """The prediction of a cell by a bundle's op times."""
        chunking = cell.scenario.policy.build().chunking
        # A micro-batch may hold several chunks.
        rows = 0 if chunking is None else chunking.rows + cell.max_batch
        sizes: Any = {"max_length": cell.max_length, "max_batch": cell.max_batch}
        sizes |= {"max_tokens": max(2 * cell.max_length, rows), "num_stages": len(cell.layers)}
        predictor = BundlePredictor(bundle_times(bundle), scope="intra_node", **sizes)
        return StageTimePrediction(cell, predictor, links)

    def __call__(self, batch: Batch) -> tuple[float, float, float, float]:
        """What the simulator asks; see :class:`~sarathi_sim.simulator.loop.replica.Predictor`."""
        layer_s, first_s, last_s, send_s = self.bundle(batch)
        layers = self.cell.layers
        offset = self.offset_s * len(layers) / sum(layers)  # a stage's offset, over its layers
        return (
            float(quantize(max(self.launch_s, offset + self.factor * layer_s))),
            float(quantize(self.factor * (first_s + self.links.decide_s))),
            float(quantize(self.factor * last_s)),
            float(quantize(send_s)),
        )

    def stages(self, decisions: Sequence[Decision], requests: Sequence[Request]) -> Floats:
        """Predicted seconds of every micro-batch on every stage, shape (batches, stages)."""
        members = {r.id: Member(r.id, r.prompt_tokens, r.max_tokens, 0) for r in requests}
        rows = []
        for decision in decisions:
            chunks = tuple((members[i], n, context) for i, n, context in decision.chunks)
            tokens, decodes = sum(n for _, n, _ in chunks), len(decision.decodes)
            contexts = decision.decode_context, decision.longest_context
            batch = Batch(decision.group, chunks, tokens, decodes, *contexts)
            rows.append(nominal_times(self.cell.layers, *self(batch))[0])
        return np.array(rows)

    def simulate(self, requests: Sequence[Request]) -> Records:
        """The open loop, without any number of the measured run."""
        switches = Switches(lazy=True, turnaround_s=self.links.turnaround_s)
        one = self.cell.scheduler()
        return simulate(requests, Replicas([one], self, self.cell.layers, switches))

    def calibrated(self, runs: Sequence[tuple[EngineRun, list[Request]]]) -> StageTimePrediction:
        """The prediction with offset and factor fitted to relative errors of other runs' stages."""
        predicted, measured = [], []
        for run, requests in runs:
            times = stage_times(run)
            measured.append((times.finish - times.start).ravel())
            predicted.append(self.stages(run.served.decisions, requests).ravel())
        x, y = np.concatenate(predicted), np.concatenate(measured)
        terms = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
        (offset, factor), *_ = np.linalg.lstsq(terms, np.ones_like(y), rcond=None)
        return replace(self, offset_s=float(offset), factor=float(factor))


def isolated_bundle(root: Path, spec: EngineSpec, environment: Facts) -> Bundle | None:
    """The bundle under ``root`` that ``profile`` measured for the engine's model, TP degree and
    number format, on the device in the engine's ``environment``; None without one."""
    hardware = "gpu" if spec.device == "cuda" else "processor"
    wanted = ("measured", spec.dtype, environment.get(hardware))
    for device, model, tp in schema.list_bundles(root):
        if (model, tp) == (spec.model.name, spec.tp):
            bundle = schema.load_bundle(schema.bundle_path(root, device, model, tp))
            meta = bundle.meta
            if (meta.source, meta.dtype, meta.environment.get(hardware)) == wanted:
                return bundle
    return None


def lost(
    device: str, run: EngineRun, requests: Sequence[Request], scheduler: Callable[[], Scheduler]
) -> dict[str, float]:
    """The apparent errors of a perfect prediction of the undisturbed run, fractions by the names of
    :data:`TARGETS`. A stage lost the time of its work that is neither CPU time nor an all-reduce.

    NaN if they are unknown: on a GPU, whose work takes no CPU time, and for bubbles if there are
    none. ``scheduler`` makes a fresh scheduler like the engine's.
    """
    if device == "cuda":
        return dict.fromkeys(TARGETS, math.nan)
    log, times = run.stages, stage_times(run)
    all_reduce = log.ops[:, :, TIMED_OPS.index(ALL_REDUCE)]
    seconds = np.maximum(0.0, log.finish - log.start - all_reduce - log.cpu)
    shares = seconds.sum(axis=1) / (times.finish - times.start).sum(axis=1)
    less, whole = (totals(replay(run, requests, scheduler(), n)) for n in (seconds, 0.0))
    errors = total_errors(less, whole)
    return {
        "iteration_error_median": float(np.median(shares)),
        "iteration_error_p90": float(np.quantile(shares, 0.9)),
        **{name: errors[name] for name in ("makespan_error", "bubble_error")},
    }


def too_much(lost: Totals) -> str | None:
    """The first target of which lost time uses up too much, in words, or None."""
    for name, share in lost.items():
        if abs(share) > (limit := MOST_OF_TARGET * TARGETS[name]):
            part = f"preempted work accounts for {abs(share):.1%} of {name}"
            return f"{part}, and {limit:.2%} is allowed"
    return None


CellRuns = tuple[EngineRun, list[tuple[EngineRun, list[Request]]]]
"""A cell's run, and the two calibration runs around it with their requests."""


@dataclass(frozen=True)
class Repeat:
    """One repeat: the grids before and after, the runs of each cell, and the load average then."""

    grids: tuple[StageLog, StageLog]
    served: dict[str, CellRuns]
    load: float

    @property
    def drift(self) -> float:
        """The grid's time after the repeat over that before it (1: no drift)."""
        before, after = ((log.finish - log.start).sum(axis=1) for log in self.grids)
        return float(np.median(after / before))


@dataclass(frozen=True)
class Agreement:
    """What holds of a run whatever the machine: whether all batches are the simulator's (``parity``
    1 or 0) or their first difference, their hash, and errors of the totals of its replay."""

    parity: float
    batches_sha256: str
    first_difference: str | None
    replay: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """One cell in one repeat. ``iterations`` and ``whole`` are by prediction, ``records`` too, with
    those of the run as "measured".

    ``steps`` has a row an iteration: its number and kind (prefill, decode, mixed).
    ``measured_iterations`` is the time of each, summed over the stages. ``measured`` and ``whole``
    are totals of runs by name, in seconds and tokens a second. ``op_share`` is the part of the time
    in GEMMs, attention, all-reduces and the LM head.
    """

    agreement: Agreement
    lost: dict[str, float]
    op_share: float
    steps: pd.DataFrame
    measured_iterations: Floats
    iterations: dict[str, Floats]
    measured: dict[str, float]
    whole: dict[str, dict[str, float]]
    records: dict[str, Records]


@dataclass(frozen=True)
class Session:
    """All measurements of one engine: its cells, their repeats, and the runs of cells that were
    served once (``online``). ``about`` describes the engine in a report. ``isolated`` is
    the bundle that ``profile`` measured for this model and device, op by op; it predicts by its
    kernels alone, and on a GPU ("launched") with the launch of each layer, too."""

    cells: list[Cell]
    repeats: list[Repeat]
    online: dict[str, EngineRun]
    seconds: float
    about: dict[str, Any]
    spec: EngineSpec
    works: list[GridWork]
    isolated: Bundle | None = None

    @property
    def layout(self) -> str:
        """The name of the engine's layout in a report."""
        return f"pp{self.spec.pp}_tp{self.spec.tp}"

    def evaluate(self, repeat: Repeat, cell: Cell) -> Comparison:
        """The comparison of one cell in one repeat."""
        (run, calibration), requests = repeat.served[cell.name], cell.requests()
        around = links(*(one for one, _ in calibration))
        played = (self.spec, 2 * self.works, repeat.grids)
        bundle = in_situ_bundle(*played, around.send_s, "in-situ")
        alone = StageTimePrediction.of(cell, bundle, around)
        predictions = {"grid": alone, "calibrated": alone.calibrated(calibration)}
        if self.isolated is not None:
            predictions["isolated"] = StageTimePrediction.of(cell, self.isolated, around)
            # The host launches a layer of one decode in that time, which a GPU's ops do not hold.
            rows = self.isolated.overhead
            launch = float(rows.loc[rows["what"] == "layer_launch", "time_us"].sum())
            if self.spec.device == "cuda" and launch:
                predictions["launched"] = replace(predictions["isolated"], launch_s=1e-6 * launch)
        decisions, times, log = run.served.decisions, stage_times(run), run.stages
        records = {"measured": measured_records(run, requests, cell.scheduler())}
        records |= {name: each.simulate(requests) for name, each in predictions.items()}
        whole = {name: totals(each) for name, each in records.items()}
        timed = log.ops[..., : len(TIMED_OPS)].sum()
        kinds = [
            "decode" if not d.chunks else "mixed" if len(d.decodes) > d.padding else "prefill"
            for d in decisions
        ]
        return Comparison(
            agreement=agreement(run, cell),
            lost=lost(self.spec.device, run, requests, cell.scheduler),
            # Norms, rotary, activation and residuals are timed with the Python code between ops.
            op_share=float((timed + log.ops[..., -1].sum()) / (log.finish - log.start).sum()),
            steps=pd.DataFrame({"micro_batch": np.arange(len(decisions)), "kind": kinds}),
            measured_iterations=(times.finish - times.start).sum(axis=1),
            iterations={
                n: each.stages(decisions, requests).sum(axis=1) for n, each in predictions.items()
            },
            measured=whole.pop("measured"),
            whole=whole,
            records=records,
        )


def agreement(run: EngineRun, cell: Cell) -> Agreement:
    """A run beside the simulator's loop with the measured times."""
    requests = cell.requests()
    difference = lockstep(run, requests, cell.scheduler())
    measured = totals(measured_records(run, requests, cell.scheduler()))
    errors = total_errors(totals(replay(run, requests, cell.scheduler())), measured)
    batches = json.dumps([signature(decision) for decision in run.served.decisions])
    digest = hashlib.sha256(batches.encode()).hexdigest()
    return Agreement(float(difference is None), digest, difference, errors)


_SILENT_S = 30.0
"""An engine that gives no sign of life for so many seconds has failed."""


def run_sessions(
    cells: Sequence[Cell],
    settings: Validation,
    progress: Progress,
    say: Say,
    profiles: Path | None = None,
    realtime: bool = False,
) -> list[Session]:
    """Measure all cells, layout by layout. Raises ProfileError where an engine fails. ``profiles``
    is the root of the bundles that :func:`isolated_bundle` searches."""
    by_layout = sorted(cells, key=lambda cell: cell.layout)
    layouts = [list(group) for _, group in groupby(by_layout, key=lambda cell: cell.layout)]
    # Checked before anything is measured.
    specs = [engine_spec(group, settings.dtype, realtime=realtime) for group in layouts]
    few, limit_s = settings.calibration_requests, settings.limit_s or math.inf
    total = len(layouts) * settings.repeats

    def serve(engine: EngineProcesses, cell: Cell, requests: list[Request]) -> EngineRun:
        return engine.serve(requests, cell.scenario.policy.described(), cell.settings)

    def repeat(engine: EngineProcesses, works: list[GridWork], number: int) -> Repeat:
        """Calibration runs have other seeds than the workloads, and than those of another one."""
        before, served = engine.play(works), dict[str, CellRuns]()
        for cell in repeated:
            first, last = (cell.requests(2_000_000 + 2 * number + n, few) for n in (0, 1))
            around = serve(engine, cell, first)
            run = serve(engine, cell, cell.requests())
            served[cell.name] = run, [(around, first), (serve(engine, cell, last), last)]
        return Repeat((before, engine.play(works)), served, getloadavg()[0])

    sessions = list[Session]()
    for spec, group in zip(specs, layouts, strict=True):
        name, works = f"pp {spec.pp}, tp {spec.tp}", grid_of(group)
        say(f"{name}: {spec.ranks} processes")
        repeated = [cell for cell in group if not cell.online]
        with EngineProcesses(spec, _SILENT_S) as engine:
            began, longest, repeats = perf_counter(), 0.0, list[Repeat]()
            engine.play(works)  # every shape once, as a warm-up
            serve(engine, group[0], group[0].requests(seed=1, count=few))
            for number in range(settings.repeats):
                start = perf_counter()
                progress("repeats", len(sessions) * settings.repeats + number, total)
                if number and start - began + longest > limit_s:
                    why = f"it could end after {limit_s:g} s"
                    say(f"{name}: repeat {number + 1} is left out: {why}")
                    continue
                repeats.append(repeat(engine, works, number))
                took = perf_counter() - start
                longest = max(longest, took)
                say(f"{name}: repeat {number + 1} of {settings.repeats} took {took:.0f} s")
            online = {
                cell.name: serve(engine, cell, cell.requests()) for cell in group if cell.online
            }
            seconds, environment = perf_counter() - began, engine.environment
        about = {"engine": environment | {"device": spec.device, "dtype": spec.dtype}}
        isolated = None
        if profiles and (isolated := isolated_bundle(profiles, spec, environment)):
            say(f"{name}: predicted from {isolated.meta.device}'s profile, too")
        sessions.append(Session(group, repeats, online, seconds, about, spec, works, isolated))
        say(f"{name}: done after {seconds:.0f} s")
    progress("repeats", total, total)
    return sessions
