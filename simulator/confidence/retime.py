"""Re-time a recorded schedule under other durations: the same batches, in the same order.

The simulation need not run again to find the makespan with slightly slower ops. A batch can be
formed when its requests have arrived and returned. From then on the pipeline is a max-plus
recurrence. It is evaluated for all samples at once, along the diagonals (batch + stage), so that
one step handles every stage of every replica. With the recorded durations it gives the recorded
finish times, to the bit.

With other durations the scheduler might decide otherwise: this is not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..loop.pipeline import Diagonal, stage_times
from ..loop.records import Floats, Ints, Records, ReplicaLog
from ..views.ledger import Spans

CHUNK = 256
"""Diagonals whose durations are prepared at a time: they fit into a CPU's cache."""

Extra = Callable[[int, Ints], tuple[Floats, Floats, Floats, Floats]]
"""``extra(replica, rows)``: seconds that each sample adds to one layer, to the first stage, to the
last stage and to the transfer, in these iterations; shapes (rows, samples)."""


@dataclass(frozen=True)
class Causes:
    """When each batch of a replica can be formed: not before ``arrived_s``, nor before batch
    ``after`` has returned (-1: none)."""

    after: Ints
    arrived_s: Floats


def causes(log: ReplicaLog, spans: Spans, arrival_s: Floats) -> Causes:
    """The events that every batch waited for, from the records. ``arrival_s`` are the arrivals of
    ``spans.requests``. Batches return in launch order, so the last awaited batch stands for all."""
    columns = log.iterations
    ready, back = columns["ready_s"], columns["finish_s"] + log.switches.turnaround_s
    after = np.full(len(ready), -1, np.int64)
    # Every member's previous span, in this group or, from a free pool, in another.
    ours = spans.by_group.astype(np.int64)
    same = np.diff(columns["group"][ours]) == 0
    _wait_for(
        after,
        ours[1:][same],
        ours[:-1][same],
        ready,
        back,
    )
    moved = np.ones(len(spans.first), bool)
    moved[spans.starts] = False
    later = np.flatnonzero(moved)
    _wait_for(
        after,
        ours[spans.first[later]],
        ours[spans.last[later - 1]],
        ready,
        back,
    )
    arrived = np.full(len(ready), -np.inf)
    np.maximum.at(arrived, spans.first_row(), arrival_s)
    known = np.maximum(np.where(after >= 0, back[after], -np.inf), arrived)
    # Batches formed later than that waited for another batch (which freed memory, say), for stage
    # 0, or else for the arrival of a request that did not join.
    other = np.searchsorted(back, ready)
    caused = (known < ready) & (back[np.minimum(other, len(back) - 1)] == ready)
    after = np.where(caused, np.maximum(after, other), after)
    unknown = (known < ready) & ~caused
    if log.switches.lazy:
        unknown[1:] &= stage_times(log).release[:-1, 0] != ready[1:]
    return Causes(after, np.where(unknown, ready, arrived))


def _wait_for(after: Ints, batches: Ints, before: Ints, ready: Floats, back: Floats) -> None:
    """Note that ``batches`` waited for the batches ``before``, unless they were formed earlier."""
    waited = back[before] <= ready[batches]
    np.maximum.at(after, batches[waited], before[waited])


def retimed_finish(
    records: Records, all_spans: Sequence[Spans], extra: Extra, samples: int, rows: list[Ints]
) -> list[Floats]:
    """Finish times in seconds of the iterations ``rows`` of each replica, shape (rows, samples)."""
    replicas = [
        _Diagonals(number, log, spans, records)
        for number, (log, spans) in enumerate(zip(records.replicas, all_spans, strict=True))
    ]
    log = records.replicas[0]
    steps = max(replica.steps for replica in replicas)
    reach = max(replica.reach for replica in replicas)
    found = [np.empty((len(wanted), samples)) for wanted in rows]
    diagonal = Diagonal((log.num_stages, len(replicas), samples), log.switches.blocking_send)
    entry, done = diagonal.arrival[0], diagonal.free[-1]
    # When what left on the last `reach` diagonals, then on this chunk's, was back; first "never".
    back = np.full((1 + reach + CHUNK, len(replicas), samples), -np.inf)
    by_row = back.reshape(-1, samples)
    for begin in range(0, steps, CHUNK):
        length = min(CHUNK, steps - begin)
        parts = [replica.durations(begin, length, reach, extra, samples) for replica in replicas]
        # One replica's, with an axis for replicas; or several's, side by side along it.
        stacked = [
            np.stack(part, axis=-2) if len(replicas) > 1 else part[0][..., None, :]
            for part in zip(*parts, strict=True)
        ]
        duration, send, after, arrived = stacked
        source = after[..., 0] * len(replicas) + np.arange(len(replicas))
        waits = np.any(arrived > -np.inf, axis=(1, 2))
        for step in range(length):
            by_row.take(source[step], 0, entry, "clip")
            if waits[step]:
                np.maximum(entry, arrived[step], out=entry)
            diagonal.advance(duration[step], send[step])
            np.add(done, log.switches.turnaround_s, out=back[1 + reach + step])
        for replica, wanted, kept in zip(replicas, rows, found, strict=True):
            returned = replica.returns[wanted] - begin
            here = (returned >= 0) & (returned < length)
            left = back[1 + reach + returned[here], replica.number]
            kept[here] = left - log.switches.turnaround_s
        if begin + length < steps:
            back[1 : 1 + reach] = back[1 + CHUNK :].copy()
    return found


class _Diagonals:
    """One replica's batches, spread over the diagonals of the recurrence.

    Batch k enters stage 0 at diagonal ``enters[k]`` and leaves the last stage ``stages - 1``
    later. If it waits for a batch that is still in the pipeline, diagonals in between stay empty:
    an empty batch takes no time and changes nothing.
    """

    def __init__(self, number: int, log: ReplicaLog, spans: Spans, records: Records) -> None:
        arrival = records.arrival_s[np.searchsorted(records.request_id, spans.requests)]
        self.number, self.log = number, log
        self.causes = causes(log, spans, arrival)
        self.enters = _entries(self.causes.after, log.num_stages)
        self.returns = self.enters + log.num_stages - 1
        self.steps = int(self.returns[-1]) + 1 if len(self.returns) else 0
        after = self.causes.after
        waits = after >= 0
        self.reach = int((self.enters - self.returns[after])[waits].max(initial=1))
        self._batch_at = np.full(self.steps + 1, -1, np.int64)
        self._batch_at[self.enters] = np.arange(len(self.enters))

    def durations(
        self, begin: int, length: int, reach: int, extra: Extra, samples: int
    ) -> tuple[Floats, Floats, Ints, Floats]:
        """Diagonals ``begin`` and on: durations (length, stages, samples), transfers
        (length, stages - 1, samples), where in the window of returns the cause is, arrivals; the
        last two of shape (length, 1)."""
        stages = self.log.num_stages
        # The batches under way: those that entered up to `stages - 1` diagonals before.
        diagonals = np.arange(begin - stages + 1, begin + length)
        inside = (diagonals >= 0) & (diagonals < self.steps)
        batch = np.where(
            inside,
            self._batch_at[np.where(inside, diagonals, 0)],
            -1,
        )
        real = np.flatnonzero(batch >= 0)
        rows = batch[real]
        duration = np.empty((length, stages, samples))
        send = np.empty((length, stages - 1, samples))
        times, link = self._times(rows, extra)
        spread = np.zeros((len(diagonals), samples))
        for stage, time in enumerate(times):
            spread[real] = time
            ahead = stages - 1 - stage
            duration[:, stage] = spread[ahead : ahead + length]
        spread[real] = link
        for stage in range(stages - 1):
            ahead = stages - 1 - stage
            send[:, stage] = spread[ahead : ahead + length]
        after = np.zeros((length, 1), np.int64)
        arrived = np.full((length, 1), -np.inf)
        entering = real >= stages - 1
        step, rows = real[entering] - (stages - 1), rows[entering]
        cause = self.causes.after[rows]
        after[step, 0] = np.where(
            cause >= 0,
            1 + reach + self.returns[cause] - begin,
            0,
        )
        arrived[step, 0] = self.causes.arrived_s[rows]
        return duration, send, after, arrived

    def _times(self, rows: Ints, extra: Extra) -> tuple[list[Floats], Floats]:
        """On each stage and on the links, in these iterations; shapes (rows, samples)."""
        log, columns = self.log, self.log.iterations
        layer_d, first_d, last_d, send_d = extra(self.number, rows)
        layer = columns["layer_s"][rows]
        times: list[Floats] = []
        for stage, layers in enumerate(log.layers):
            inner = 0 < stage < log.num_stages - 1
            if stage > 1 and inner and log.stage_s is None and layers == log.layers[stage - 1]:
                times.append(times[-1])
                continue
            recorded, added = layers * layer, layers * layer_d
            if stage == 0:
                recorded, added = recorded + columns["first_s"][rows], added + first_d
            if stage == log.num_stages - 1:
                recorded, added = recorded + columns["last_s"][rows], added + last_d
            if log.stage_s is not None:  # jitter: what is added is stretched alike
                actual = log.stage_s[rows, stage]
                added = added * (actual / recorded)[:, None]
                recorded = actual
            times.append(recorded[:, None] + added)
        return times, columns["send_s"][rows, None] + send_d


def _entries(after: Ints, stages: int) -> Ints:
    """The diagonal at which each batch enters: after the batch before it, and once the batch
    ``after`` (-1: none) has left ``stages`` stages."""
    enters = np.arange(len(after))
    late = np.flatnonzero((after >= 0) & (after + stages > enters))
    if len(late):  # before it nothing stays empty
        begin = int(late[0])
        known = enters[:begin].tolist()
        entry = begin - 1
        for cause in after[begin:].tolist():
            entry += 1
            if cause >= 0 and known[cause] + stages > entry:
                entry = known[cause] + stages
            known.append(entry)
        enters = np.array(known, np.int64)
    return enters
