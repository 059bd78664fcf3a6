"""Our engine in torch: its sessions, its log in the simulator's terms (records, lock-step, replay),
predictions of its times, its disturbance, and its runs beside the simulator."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from os import getloadavg
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd

from sarathi_sim.experiments.config.scenario import Validation
from sarathi_sim.experiments.measured.session import (
    Cell,
    Comparison,
    Plan,
    Repeat,
    Session,
    middle,
    middles,
    plan_of,
    repeats_of,
    total_errors,
)
from sarathi_sim.experiments.run.decision_log import Replay
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.request import Sequence as Member
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.bundle.schema import Bundle, bundle_path, list_bundles, load_bundle
from sarathi_sim.profiler.engine.driver import Decision, Served, signature
from sarathi_sim.profiler.engine.processes import EngineProcesses, EngineRun, Facts, StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS, EngineSpec
from sarathi_sim.profiler.facts.ops import ALL_REDUCE
from sarathi_sim.profiler.measuring.to_bundle import GridWork, grid_works, in_situ_bundle
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.loop.lockstep import Formed, Recorded, play_back, records_of_one
from sarathi_sim.simulator.loop.pipeline import nominal_times
from sarathi_sim.simulator.loop.records import (
    ITERATION_COLUMNS,
    Floats,
    PoolLog,
    Records,
    ReplicaLog,
    StageTimes,
    Switches,
)
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.op_times.regression import bundle_times
from sarathi_sim.simulator.views.ledger import WAITS
from sarathi_sim.simulator.views.metrics import Analysis

Dtype = Literal["float32", "bfloat16", "float16"]
TARGETS = {
    "iteration_error_median": 0.05,
    "iteration_error_p90": 0.15,
    "makespan_error": 0.05,
    "bubble_error": 0.10,
}
MOST_OF_TARGET = 0.5
"""The part of a target that lost time may use up: half. If a prediction still misses the target,
its own error is larger than the machine's."""


def engine_spec(
    cells: Sequence[Cell], dtype: Dtype = "float32", *, realtime: bool = False
) -> EngineSpec:
    """The engine that can serve all of the cells, which have one layout."""
    first = cells[0]
    for cell in cells:
        problem = f"must be as in {first.name}, whose engine it shares"
        if (cell.model, cell.layers) != (first.model, first.layers):
            raise cell.source.error("model", cell.scenario.model, problem)
        if cell.device != first.device:
            raise cell.source.error("device", cell.device, problem)
        if _block_size(cell) != _block_size(first):
            raise cell.source.error("kv_cache.block_size", _block_size(cell), problem)
    batch = max(cell.sequences for cell in cells)
    slots = max(
        cell.sequences * (1 if cell.kv_cache else cell.settings["max_in_flight"]) for cell in cells
    )
    longest = max(cell.max_length for cell in cells)
    return EngineSpec(
        first.model,
        first.layers,
        first.scenario.cluster.tp,
        slots=slots + 1,  # the grid's chunk has a slot of its own
        max_length=longest,
        max_tokens=batch * longest,
        num_blocks=max(cell.memory.get("num_blocks", 0) for cell in cells),
        block_size=_block_size(first) or 0,
        device=first.device,
        dtype=dtype,
        realtime=realtime,
    )


def _block_size(cell: Cell) -> int | None:
    return cell.kv_cache.block_size if cell.kv_cache else None


def grid_of(cells: Sequence[Cell]) -> list[GridWork]:
    """Micro-batches that cover the range of the cells' micro-batches."""
    batch = max(cell.sequences for cell in cells)
    requests = [request for cell in cells for request in cell.requests()]
    prompt = max(request.prompt_tokens for request in requests)
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    chunks: set[int] = set()
    for cell in cells:
        chunking = cell.scenario.policy.build().chunking
        if chunking is not None:
            size = chunking.tokens
            chunks |= {max(1, size // 4), max(1, size // 2), max(1, size - batch), size}
    whole = [16, 32, *range(64, prompt, 64), prompt]
    return grid_works(batch, sorted(c for c in chunks if c <= prompt), whole, longest)


def isolated_bundle(root: Path, spec: EngineSpec, known: Facts) -> Bundle | None:
    """The bundle under ``root`` that ``profile`` measured for the engine's model, TP degree and
    number format, on the device in the engine's facts; None without one."""
    hardware = "gpu" if spec.device == "cuda" else "processor"
    for device, model, tp in list_bundles(root):
        if (model, tp) != (spec.model.name, spec.tp):
            continue
        bundle = load_bundle(bundle_path(root, device, model, tp))
        meta = bundle.meta
        same = meta.environment.get(hardware) == known.get(hardware)
        if same and (meta.source, meta.dtype) == ("measured", spec.dtype):
            return bundle
    return None


def launch_s(bundle: Bundle) -> float:
    """Seconds in which the host launched a layer of one decode; 0 where that was not measured. The
    ops of a GPU do not hold it, those of a CPU do."""
    rows = bundle.overhead
    return 1e-6 * float(rows.loc[rows["what"] == "layer_launch", "time_us"].sum())


# Its log in the simulator's terms ---------------------------------------------------------------


def kinds(decisions: Sequence[Decision]) -> list[str]:
    """Each micro-batch's kind, prefill, decode or mixed."""
    return [
        "decode" if not d.chunks else "mixed" if len(d.decodes) > d.padding else "prefill"
        for d in decisions
    ]


def stage_times(run: EngineRun) -> StageTimes:
    """The busy times of every stage. The first one's work begins with the scheduler's decision."""
    start = run.stages.start.copy()
    start[:, 0] = [decision.clock_s for decision in run.served.decisions]
    finish = run.stages.finish
    return StageTimes(start, finish, finish)


def links(run: EngineRun) -> tuple[Floats, float]:
    """Median seconds of each transfer between stages, shape (stages - 1,), and of a return.

    Only messages with a waiting receiver count: the others waited for a busy receiver.
    """
    log, decisions = run.stages, run.served.decisions
    finish = log.finish
    sends = []
    for stage in range(1, finish.shape[1]):
        idle = np.ones(len(finish), np.bool_)
        idle[1:] = finish[1:, stage - 1] > finish[:-1, stage]
        took = (log.arrived[:, stage] - finish[:, stage - 1])[idle]
        # A message may arrive before the sender has logged the send.
        sends.append(max(0.0, float(np.median(took))))
    returned = np.array([decision.returned_s for decision in decisions])
    if finish.shape[1] == 1:
        return np.zeros(0), float(np.median(returned - finish[:, -1]))
    clock = np.array([decision.clock_s for decision in decisions])
    # The first stage's last work before the return was handled.
    before = np.searchsorted(clock, returned) - 1
    idle = finish[:, -1] > finish[before, 0]
    waits = (returned - finish[:, -1])[idle if idle.any() else slice(None)]
    return np.array(sends), float(np.median(waits))


def pool_log(served: Served, block_size: int) -> PoolLog:
    """The engine's log of its paged memory."""
    return PoolLog(
        np.array(served.kv_log, np.int32),
        block_size,
        np.array(served.events, np.int64).reshape(-1, 3),
    )


def measured_records(run: EngineRun, requests: Sequence[Request], scheduler: Scheduler) -> Records:
    """The run as the simulator would record it, so that the same metrics apply.

    ``scheduler`` has the sizes of the engine's.
    """
    served = run.served
    times = stage_times(run)
    sends, turnaround = links(run)
    rows = [
        (d.group, len(d.chunks), sum(c[1] for c in d.chunks), sum(c[2] for c in d.chunks),
         len(d.decodes), d.decode_context, d.padding)
        for d in served.decisions
    ]  # fmt: skip
    group, chunks, tokens, context, decodes, held, padding = np.array(rows, float).reshape(-1, 7).T
    columns = dict.fromkeys(ITERATION_COLUMNS, np.zeros(len(rows)))
    columns |= {
        "group": group,
        "ready_s": times.start[:, 0].copy(),
        "finish_s": times.finish[:, -1].copy(),
        "send_s": np.full(len(rows), sends.mean() if len(sends) else 0.0),
        "chunks": chunks,
        "prefill_tokens": tokens,
        "prefill_context": context,
        "decodes": decodes,
        "decode_context": held,
        "padding": padding,
    }
    log = ReplicaLog(
        layers=(1,) * times.start.shape[1],
        switches=Switches(lazy=True, turnaround_s=turnaround),
        max_in_flight=scheduler.max_in_flight,
        max_batch=scheduler.max_batch,
        kv_capacity=scheduler.kv_capacity,
        iterations=columns,
        spans=np.array(served.spans, np.int64).reshape(-1, 5),
        stage_s=times.finish - times.start,
        measured=times,
        pool=pool_log(served, scheduler.blocks.block_size) if isinstance(scheduler, Pool) else None,
    )
    return records_of_one(requests, served.rejected, log)


def lockstep(run: EngineRun, requests: Sequence[Request], scheduler: Scheduler) -> str | None:
    """The first difference of the simulator's loop from the run, given the measured times and the
    clocks of the decisions; None if there is none.

    Each batch must be the same, and be formed at the same clock: by then its requests had returned
    or arrived in the simulation, too.
    """
    log, decisions = run.stages, run.served.decisions
    clock = np.array([decision.clock_s for decision in decisions])
    returned = np.array([decision.returned_s for decision in decisions])
    # The times must add up to the whole time between a decision and its return.
    taken = np.column_stack([clock, log.arrived[:, 1:]])
    recorded = Recorded(
        log.finish - taken,
        log.arrived[:, 1:] - log.finish[:, :-1],
        returned - log.finish[:, -1],
        clock,
    )
    formed, records = play_back(requests, scheduler, recorded)
    if found := first_difference(decisions, formed):
        return found
    if isinstance(scheduler, Pool):
        engine = pool_log(run.served, scheduler.blocks.block_size)
        if found := _memory_difference(engine, records.replicas[0].pool):
            return found
    ready = records.replicas[0].iterations["ready_s"]
    late = np.flatnonzero(ready != quantize(clock)[: len(formed)])
    return f"batch {late[0]}: not formed when the engine did" if late.size else None


def first_difference(decisions: Sequence[Decision], formed: Sequence[Formed]) -> str | None:
    """The first batch that differs in anything but its times."""
    real = [signature(decision) for decision in decisions]
    simulated = [(f.group, f.chunks, f.decodes, f.decode_context, f.padding) for f in formed]
    for number, (one, other) in enumerate(zip(real, simulated, strict=False)):
        if one != other:
            return f"batch {number}: engine {_words(one)}; simulator {_words(other)}"
    if len(real) != len(simulated):
        return f"engine {len(real)} batches; simulator {len(simulated)}"
    return None


def _words(batch: tuple[object, ...]) -> str:
    group, chunks, decodes, context, padding = batch
    text = f"micro-batch {group}, chunks {chunks}, decodes {decodes}, context {context}"
    return f"{text}, padding {padding}" if padding else text


def _memory_difference(engine: PoolLog, simulated: PoolLog | None) -> str | None:
    """The first difference in blocks in use at a decision, or in tokens hit and lost; or None."""
    assert simulated is not None
    differ = np.flatnonzero(engine.kv_tokens != simulated.kv_tokens)
    if differ.size:
        first = differ[0]
        return (
            f"batch {first}: engine {engine.kv_tokens[first]} tokens of KV blocks in use; "
            f"simulator {simulated.kv_tokens[first]}"
        )
    same = engine.events.tolist() == simulated.events.tolist()
    return None if same else "other tokens were hit in the cache, or lost"


def batches_sha256(decisions: Sequence[Decision]) -> str:
    """The hash of the batches, without their times."""
    batches = [signature(decision) for decision in decisions]
    return hashlib.sha256(json.dumps(batches).encode()).hexdigest()


def replay(
    run: EngineRun,
    requests: Sequence[Request],
    scheduler: Scheduler,
    less: Floats | float = 0.0,
) -> Records:
    """The simulator's loop with the measured service times alone; links take their medians.

    ``less``: seconds by which each stage's work is shortened.
    """
    times = stage_times(run)
    sends, turnaround = links(run)
    count = len(times.start)
    recorded = Recorded(
        times.finish - times.start - less,
        np.broadcast_to(sends, (count, len(sends))),
        np.full(count, turnaround),
    )
    return play_back(requests, scheduler, recorded)[1]


@dataclass(frozen=True)
class Links:
    """Seconds around the stages' work, medians over calibration runs.

    ``send_s`` to the next stage; ``turnaround_s`` from the last stage's finish until rank 0 had
    handled it; ``decide_s`` for a decision, within the first stage's time.
    """

    send_s: float
    turnaround_s: float
    decide_s: float

    @staticmethod
    def of(runs: Sequence[EngineRun]) -> Links:
        """The links measured in these runs."""
        found = [links(run) for run in runs]
        decide = [
            run.stages.start[:, 0] - [decision.clock_s for decision in run.served.decisions]
            for run in runs
        ]
        sends = [sends.mean() if len(sends) else 0.0 for sends, _ in found]
        return Links(
            float(np.median(sends)),
            float(np.median([turnaround for _, turnaround in found])),
            float(np.median(np.concatenate(decide))),
        )


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

    def __call__(self, batch: Batch) -> tuple[float, float, float, float]:
        """What the simulator asks; see :class:`~sarathi_sim.simulator.loop.replica.Predictor`."""
        layer_s, first_s, last_s, send_s = self.bundle(batch)
        layers = self.cell.layers
        offset = self.offset_s * len(layers) / sum(layers)  # a stage's offset, over its layers
        times = (
            max(self.launch_s, offset + self.factor * layer_s),
            self.factor * (first_s + self.links.decide_s),
            self.factor * last_s,
            send_s,
        )
        layer, first, last, send = (float(quantize(t)) for t in times)
        return layer, first, last, send

    def stages(self, decisions: Sequence[Decision], requests: Sequence[Request]) -> Floats:
        """Predicted seconds of every micro-batch on every stage, shape (batches, stages)."""
        members = {r.id: Member(r.id, r.prompt_tokens, r.max_tokens, 0) for r in requests}
        rows = []
        for decision in decisions:
            chunks = tuple((members[i], n, context) for i, n, context in decision.chunks)
            tokens = sum(n for _, n, _ in chunks)
            batch = Batch(
                decision.group,
                chunks,
                tokens,
                len(decision.decodes),
                decision.decode_context,
                decision.longest_context,
            )
            rows.append(nominal_times(self.cell.layers, *self(batch))[0])
        return np.array(rows)

    def simulate(self, requests: Sequence[Request]) -> Records:
        """The open loop, without any number of the measured run."""
        return simulate(
            requests,
            [self.cell.scheduler(requests)],
            self,
            self.cell.layers,
            switches=Switches(lazy=True, turnaround_s=self.links.turnaround_s),
        )

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
        return StageTimePrediction(self.cell, self.bundle, self.links, float(offset), float(factor))


def bundle_predictor(cell: Cell, ops: OpTimes) -> BundlePredictor:
    """The predictor of a cell, from the op times of its engine."""
    chunking = cell.scenario.policy.build().chunking
    # A micro-batch may hold several chunks.
    rows = 0 if chunking is None else chunking.rows + cell.sequences
    return BundlePredictor(
        ops,
        max_tokens=max(2 * cell.max_length, rows),
        max_length=cell.max_length,
        max_batch=cell.sequences,
        scope="intra_node",
        num_stages=len(cell.layers),
    )


# The disturbance of a run -----------------------------------------------------------------------


@dataclass(frozen=True)
class LostTime:
    """The apparent errors of a perfect prediction of the undisturbed run.

    Fractions, by the same names as :data:`TARGETS`. NaN if they are unknown: on a GPU, whose work
    takes no CPU time, and for bubbles if there are none.
    """

    iteration_error_median: float
    iteration_error_p90: float
    makespan_error: float
    bubble_error: float

    def too_much(self) -> str | None:
        """The first target of which lost time uses up too much, in words, or None."""
        for name, share in asdict(self).items():
            limit = MOST_OF_TARGET * TARGETS[name]
            if abs(share) > limit:
                return (
                    f"preempted work accounts for {abs(share):.1%} of {name}, "
                    f"and {limit:.2%} is allowed"
                )
        return None


def lost_seconds(log: StageLog) -> Floats:
    """Lost time of each stage's work on each micro-batch."""
    wall = log.finish - log.start - log.ops[:, :, TIMED_OPS.index(ALL_REDUCE)]
    return np.asarray(np.maximum(0.0, wall - log.cpu))


def lost(
    spec: EngineSpec,
    run: EngineRun,
    requests: Sequence[Request],
    scheduler: Callable[[], Scheduler],
) -> LostTime:
    """The effect of lost time on a run: on its iterations and, through the pipeline, on its totals.

    ``scheduler`` makes a fresh scheduler like the engine's.
    """
    if spec.device == "cuda":
        return LostTime(*[float("nan")] * 4)
    seconds, times = lost_seconds(run.stages), stage_times(run)
    shares = seconds.sum(axis=1) / (times.finish - times.start).sum(axis=1)
    errors = total_errors(
        totals(replay(run, requests, scheduler(), less=seconds)),
        totals(replay(run, requests, scheduler())),
    )
    middle, far = float(np.median(shares)), float(np.quantile(shares, 0.9))
    return LostTime(middle, far, errors["makespan_error"], errors["bubble_error"])


# Measured beside simulated ----------------------------------------------------------------------


def totals(records: Records) -> dict[str, float]:
    """A run in totals: seconds, and tokens a second.

    Bubbles are the ledger's, with communication and turn-around; by stage if there is a pipeline.
    """
    analysis = Analysis(records)
    table = analysis.requests
    stages = [
        sum(float(row[f"{name}_s"]) for name in WAITS) for _, row in analysis.ledger.iterrows()
    ]
    tokens = int(records.prompt_tokens.sum() + records.output_tokens.sum())
    makespan = records.end_s - float(records.arrival_s.min())
    found = {
        "makespan": makespan,
        "throughput": tokens / makespan,
        "ttft_p50": float(table["ttft_s"].quantile(0.5)),
        "ttft_p90": float(table["ttft_s"].quantile(0.9)),
        "bubble": sum(stages),
        "bubble_per_request": float(table["bubble_s"].mean()),
    }
    if len(stages) > 1:
        found |= {f"bubble_stage{stage}": seconds for stage, seconds in enumerate(stages)}
    return found


@dataclass(frozen=True)
class TorchSession(Session):
    """The measurements on one engine of ours; totals of its runs ``replayed`` with measured times;
    and ``op_share``, the part of the time in GEMMs, attention, all-reduces and the LM head.
    ``isolated`` is the bundle that ``profile`` measured for this model and device, op by op; it
    predicts by its kernels alone, and on a GPU ("launched") with the launch of each layer, too."""

    spec: EngineSpec
    works: list[GridWork]
    isolated: Bundle | None = None

    targets: ClassVar[dict[str, float]] = TARGETS
    measures: ClassVar[dict[str, str]] = {
        "makespan": "makespan_s",
        "throughput": "tokens_per_s",
        "bubble": "bubble_s",
        "bubble_per_request": "bubble_per_request_s",
    }

    def drift(self, repeat: Repeat) -> float:
        before, after = ((log.finish - log.start).sum(axis=1) for log in repeat.grids)
        return float(np.median(after / before))

    def spoilt(self, outcome: Comparison) -> str | None:
        found: LostTime = outcome.more["lost"]
        return found.too_much()

    def evaluate(self, repeat: Repeat, cell: Cell) -> Comparison:
        served = repeat.served[cell.name]
        run, requests = served.run, cell.requests()
        around = Links.of([calibration for calibration, _ in served.calibration])
        grid = joined(repeat.grids)
        bundle = in_situ_bundle(self.spec, 2 * self.works, grid, around.send_s, "in-situ")
        alone = StageTimePrediction(cell, bundle_predictor(cell, bundle_times(bundle)), around)
        predictions = {"grid": alone, "calibrated": alone.calibrated(served.calibration)}
        if self.isolated is not None:
            ops = bundle_predictor(cell, bundle_times(self.isolated))
            predictions["isolated"] = kernels = StageTimePrediction(cell, ops, around)
            launched = replace(kernels, launch_s=launch_s(self.isolated))
            if self.spec.device == "cuda" and launched != kernels:
                predictions["launched"] = launched
        decisions, times = run.served.decisions, stage_times(run)
        measured = measured_records(run, requests, cell.scheduler())
        simulated = {name: p.simulate(requests) for name, p in predictions.items()}
        difference = lockstep(run, requests, cell.scheduler())
        steps = {"micro_batch": np.arange(len(decisions)), "kind": kinds(decisions)}
        return Comparison(
            parity=Replay(1, int(difference is None), difference),
            steps=pd.DataFrame(steps),
            measured_iterations=(times.finish - times.start).sum(axis=1),
            iterations={
                name: p.stages(decisions, requests).sum(axis=1) for name, p in predictions.items()
            },
            measured=totals(measured),
            whole={name: totals(records) for name, records in simulated.items()},
            records={"measured": measured, **simulated},
            more={
                "batches_sha256": batches_sha256(decisions),
                "replayed": totals(replay(run, requests, cell.scheduler())),
                "lost": lost(self.spec, run, requests, cell.scheduler),
                "op_share": _op_share(run.stages),
            },
        )

    def entry(
        self, cell: Cell, outcomes: Sequence[Comparison], some: Sequence[Comparison]
    ) -> dict[str, Any]:
        return {
            "batches_sha256": sorted({outcome.more["batches_sha256"] for outcome in outcomes}),
            "lost": [asdict(outcome.more["lost"]) for outcome in outcomes],
            "op_share": middle([outcome.more["op_share"] for outcome in some]),
            "replay": middles([total_errors(o.more["replayed"], o.measured) for o in some]),
        }

    def served_once(self) -> dict[str, dict[str, Any]]:
        found = {}
        for cell in (each for each in self.cells if each.name in self.online):
            run, requests = self.online[cell.name], cell.requests()
            difference = lockstep(run, requests, cell.scheduler())
            measured = totals(measured_records(run, requests, cell.scheduler()))
            replayed = totals(replay(run, requests, cell.scheduler()))
            found[cell.name] = {
                "parity": float(difference is None),
                "batches_sha256": batches_sha256(run.served.decisions),
                "first_difference": difference,
                "replay": total_errors(replayed, measured),
            }
        return found


def _answer(
    engine: EngineProcesses,
    cell: Cell | None,
    requests: list[Request] | None,
    works: list[GridWork],
) -> Any:
    """The engine's answer to an item of the plan."""
    if requests is None or cell is None:
        return engine.play(works)
    return engine.serve(requests, cell.policy, cell.settings, **cell.memory)


def joined(grids: tuple[StageLog, StageLog]) -> StageLog:
    """The logs of the grids before and after, concatenated."""
    before, after = grids
    columns = ("arrived", "start", "finish", "cpu", "ops")
    return StageLog(*(np.concatenate([getattr(before, c), getattr(after, c)]) for c in columns))


def _op_share(log: StageLog) -> float:
    """The share of the time without norms, rotary, activation and residuals: these are timed
    together with the Python code between the ops."""
    layers, head = log.ops[..., : len(TIMED_OPS)], log.ops[..., -1]
    return float((layers.sum() + head.sum()) / (log.finish - log.start).sum())


# Sessions ----------------------------------------------------------------------------------------


def run_sessions(
    cells: Sequence[Cell],
    settings: Validation,
    *,
    realtime: bool,
    timeout_s: float,
    progress: Progress,
    say: Say,
    profiles: Path | None = None,
) -> list[TorchSession]:
    """Measure all cells, layout by layout. Raises ProfileError where an engine fails.

    ``profiles`` is the root of the bundles that :func:`isolated_bundle` searches.
    """
    by_layout = sorted(cells, key=lambda cell: cell.layout)
    layouts = [list(group) for _, group in groupby(by_layout, key=lambda cell: cell.layout)]
    # Checked before anything is measured.
    specs = [engine_spec(group, settings.dtype, realtime=realtime) for group in layouts]
    plans = [plan_of(g, settings, [cell for cell in g if cell.online]) for g in layouts]
    repeats, limit_s = range(1, settings.repeats + 1), settings.limit_s or math.inf
    done, total = 0, sum(len(part) for parts in plans for part in parts)
    sessions = []
    for spec, group, parts in zip(specs, layouts, plans, strict=True):
        name, works = f"pp {spec.pp}, tp {spec.tp}", grid_of(group)
        say(f"{name}: {spec.ranks} processes")
        named = {"warm-up": group[0]} | {cell.name: cell for cell in group}
        plan, answers, loads = Plan(), list[Any](), list[float]()
        with EngineProcesses(spec, timeout_s) as engine:
            began, longest = perf_counter(), 0.0
            for number, part in enumerate(parts):
                start = perf_counter()
                if number in repeats[1:] and start - began + longest > limit_s:
                    say(f"{name}: repeat {number} is left out: it could end after {limit_s:g} s")
                    done += len(part)
                    continue
                for cell_name, requests in part:
                    progress("runs of the engine", done, total)
                    answers.append(_answer(engine, named.get(cell_name), requests, works))
                    loads.append(getloadavg()[0])
                    done += 1
                plan += part
                if number in repeats:
                    took = perf_counter() - start
                    longest = max(longest, took)
                    say(f"{name}: repeat {number} of {settings.repeats} took {took:.0f} s")
            seconds, known = perf_counter() - began, engine.environment
        measured, online = repeats_of(plan, answers, loads)
        layout, isolated = f"pp{spec.pp}_tp{spec.tp}", None
        about = {"engine": known | {"device": spec.device, "dtype": spec.dtype}}
        if profiles and (isolated := isolated_bundle(profiles, spec, known)):
            say(f"{name}: predicted from {isolated.meta.device}'s profile, too")
        sessions.append(
            TorchSession(layout, group, measured, online, seconds, about, spec, works, isolated)
        )
        say(f"{name}: done after {seconds:.0f} s")
    progress("runs of the engine", total, total)
    return sessions
