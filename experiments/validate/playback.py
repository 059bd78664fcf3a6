"""From an engine's measurements to the simulator's terms: records, and times to play back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.engine.driver import Decision, Served, signature
from sarathi_sim.profiler.engine.processes import EngineRun
from sarathi_sim.simulator.loop.lockstep import Formed, Recorded, play_back, records_of_one
from sarathi_sim.simulator.loop.quantum import quantize
from sarathi_sim.simulator.loop.records import (
    ITERATION_COLUMNS,
    Floats,
    PoolLog,
    Records,
    ReplicaLog,
    StageTimes,
)
from sarathi_sim.simulator.loop.switches import Switches

KINDS = ("prefill", "decode", "mixed")


def kinds(decisions: Sequence[Decision]) -> list[str]:
    """Each micro-batch's kind, one of :data:`KINDS`."""
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
        # A message may be there before the sender has noted that it is on its way.
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
    """What the engine did with its paged memory."""
    return PoolLog(
        np.array(served.kv_log, np.int32),
        block_size,
        np.array(served.events, np.int64).reshape(-1, 3),
    )


def measured_records(run: EngineRun, requests: Sequence[Request], scheduler: Scheduler) -> Records:
    """The run as the simulator would record it, so that the same metrics apply.

    ``scheduler`` is one like the engine's, for its sizes.
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


# Lock-step and replay --------------------------------------------------------------------------


@dataclass(frozen=True)
class Parity:
    """Whether two sequences of batches are the same: hashes, and the first difference in words."""

    batches: int
    engine_sha256: str
    simulator_sha256: str
    difference: str | None

    @property
    def identical(self) -> bool:
        """Whether the two sequences are the same."""
        return self.difference is None


def lockstep(run: EngineRun, requests: Sequence[Request], scheduler: Scheduler) -> Parity:
    """The simulator's loop with the measured times and the clocks that the decisions saw.

    Each batch must be the same, and be formed at the same clock: by then its requests had returned
    or arrived in the simulation, too.
    """
    log, decisions = run.stages, run.served.decisions
    clock = np.array([decision.clock_s for decision in decisions])
    returned = np.array([decision.returned_s for decision in decisions])
    # Everything between a decision and its return counts, so that the times add up to it.
    taken = np.column_stack([clock, log.arrived[:, 1:]])
    recorded = Recorded(
        log.finish - taken,
        log.arrived[:, 1:] - log.finish[:, :-1],
        returned - log.finish[:, -1],
        clock,
    )
    formed, records = play_back(requests, scheduler, recorded)
    parity = compare(decisions, formed)
    if parity.identical and isinstance(scheduler, Pool):
        parity = _same_memory(parity, pool_log(run.served, scheduler.blocks.block_size), records)
    late = np.flatnonzero(
        records.replicas[0].iterations["ready_s"] != quantize(clock)[: len(formed)]
    )
    if parity.identical and late.size:
        parity = replace(parity, difference=f"batch {late[0]}: not formed when the engine did")
    return parity


def _same_memory(parity: Parity, engine: PoolLog, records: Records) -> Parity:
    """Whether as many blocks were in use at each decision, and the same tokens hit and lost."""
    simulated = records.replicas[0].pool
    assert simulated is not None
    differ = np.flatnonzero(engine.kv_tokens != simulated.kv_tokens)
    if differ.size:
        first = differ[0]
        difference = (
            f"batch {first}: engine {engine.kv_tokens[first]} tokens of KV blocks in use; "
            f"simulator {simulated.kv_tokens[first]}"
        )
        return replace(parity, difference=difference)
    if engine.events.tolist() != simulated.events.tolist():
        return replace(parity, difference="other tokens were hit in the cache, or lost")
    return parity


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


def compare(decisions: Sequence[Decision], formed: Sequence[Formed]) -> Parity:
    """Batch by batch, everything but the times."""
    real = [signature(decision) for decision in decisions]
    simulated = [(f.group, f.chunks, f.decodes, f.decode_context, f.padding) for f in formed]
    difference = None
    for number, (one, other) in enumerate(zip(real, simulated, strict=False)):
        if one != other:
            difference = f"batch {number}: engine {_words(one)}; simulator {_words(other)}"
            break
    else:
        if len(real) != len(simulated):
            difference = f"engine {len(real)} batches; simulator {len(simulated)}"
    return Parity(len(real), _sha256(real), _sha256(simulated), difference)


def _words(batch: tuple[object, ...]) -> str:
    group, chunks, decodes, context, padding = batch
    text = f"micro-batch {group}, chunks {chunks}, decodes {decodes}, context {context}"
    return f"{text}, padding {padding}" if padding else text


def _sha256(batches: Sequence[tuple[object, ...]]) -> str:
    return hashlib.sha256(json.dumps(batches).encode()).hexdigest()
