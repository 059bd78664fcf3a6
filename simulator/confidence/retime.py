"""Re-time a recorded schedule under other durations: the same batches, in the same order.

For the question "how long would it have taken, had the ops been a little slower?" the simulation
need not run again. A batch can be formed once its members are back and have arrived, and from
there on the pipeline is a max-plus recurrence. It is evaluated for all samples at once, along the
diagonals (batch + stage), so that one step handles every stage of every replica. With the recorded
durations it gives the recorded finish times, to the bit.

What it leaves out: with other durations the scheduler might have decided otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.loop.pipeline import advance, stage_times
from simulator.loop.records import Floats, Ints, Records, ReplicaLog
from simulator.views.spans import Spans

CHUNK = 256
"""Diagonals whose durations are laid out at a time: about what a cache holds."""

Extra = Callable[[int, Ints], tuple[Floats, Floats, Floats, Floats]]
"""``extra(replica, rows)``: what each sample adds, in seconds, to the time of one layer, of the
first stage, of the last and of the transfer, in these iterations; shapes (rows, samples)."""


@dataclass(frozen=True)
class Causes:
    """When each batch of a replica can be formed: not before ``arrived_s``, nor before batch
    ``after`` came back (-1: none)."""

    after: Ints
    arrived_s: Floats


def causes(log: ReplicaLog, spans: Spans, arrival_s: Floats) -> Causes:
    """What every batch waited for, from the records.

    ``arrival_s`` are the arrivals of ``spans.requests``. Batches come back in launch order, so
    the last of those awaited stands for all.
    """
    columns = log.iterations
    ready, back = columns["ready_s"], columns["finish_s"] + log.switches.turnaround_s
    after = np.full(len(ready), -1, np.int64)
    # Every member's previous span, in this group or, from a free pool, in another.
    ours = spans.by_group
    same = np.diff(columns["group"][ours]) == 0
    _wait_for(after, ours[1:][same], ours[:-1][same], ready, back)
    moved = np.ones(len(spans.first), bool)
    moved[spans.starts] = False
    later = np.flatnonzero(moved)
    _wait_for(after, ours[spans.first[later]], ours[spans.last[later - 1]], ready, back)
    arrived = np.full(len(ready), -np.inf)
    np.maximum.at(arrived, spans.first_row(), arrival_s)
    known = np.maximum(np.where(after >= 0, back[after], -np.inf), arrived)
    # Formed later than that: when another batch came back (which freed memory, say), or stage 0
    # was free, or else when something arrived that did not join.
    other = np.searchsorted(back, ready)
    caused = (known < ready) & (back[np.minimum(other, len(back) - 1)] == ready)
    after = np.where(caused, np.maximum(after, other), after)
    unknown = (known < ready) & ~caused
    if log.switches.lazy:
        unknown[1:] &= stage_times(log).release[:-1, 0] != ready[1:]
    return Causes(after, np.where(unknown, ready, arrived))


def _wait_for(after: Ints, batches: Ints, before: Ints, ready: Floats, back: Floats) -> None:
    """Note that ``batches`` waited for those ``before``, unless they were formed without them."""
    waited = back[before] <= ready[batches]
    np.maximum.at(after, batches[waited], before[waited])


def retimed_finish(
    records: Records, all_spans: Sequence[Spans], extra: Extra, samples: int, rows: list[Ints]
) -> list[Floats]:
    """Finish times in seconds of the iterations ``rows`` of each replica, shape (rows, samples)."""
    lines = [
        _Diagonals(number, log, spans, records)
        for number, (log, spans) in enumerate(zip(records.replicas, all_spans, strict=True))
    ]
    log = records.replicas[0]
    stages, replicas = log.num_stages, len(lines)
    steps = max(line.steps for line in lines)
    reach = max(line.reach for line in lines)
    found = [np.empty((len(wanted), samples)) for wanted in rows]
    free = np.full((replicas, stages, samples), -np.inf)
    arrival = np.full_like(free, -np.inf)
    # When what left on the last `reach` diagonals, then on this chunk's, was back; first "never".
    back = np.full((replicas, 1 + reach + CHUNK, samples), -np.inf)
    which = np.arange(replicas)
    for begin in range(0, steps, CHUNK):
        length = min(CHUNK, steps - begin)
        laid = [line.lay(begin, length, reach, extra, samples) for line in lines]
        duration = np.stack([part[0] for part in laid], axis=1)
        send = np.stack([part[1] for part in laid], axis=1)
        after = np.stack([part[2] for part in laid], axis=1)
        arrived = np.stack([part[3] for part in laid], axis=1)[..., None]
        for step in range(length):
            np.maximum(back[which, after[step]], arrived[step], out=arrival[:, 0])
            advance(free, arrival, duration[step], send[step], log.switches.blocking_send)
            np.add(free[:, -1], log.switches.turnaround_s, out=back[:, 1 + reach + step])
        for line, wanted, into in zip(lines, rows, found, strict=True):
            place = line.returns[wanted] - begin
            here = (place >= 0) & (place < length)
            into[here] = back[line.number, 1 + reach + place[here]] - log.switches.turnaround_s
        if begin + length < steps:
            back[:, 1 : 1 + reach] = back[:, 1 + CHUNK :].copy()
    return found


class _Diagonals:
    """One replica's batches, spread over the diagonals of the recurrence.

    Batch k enters stage 0 at diagonal ``enters[k]`` and leaves the last stage ``stages - 1``
    later. Where it must wait for one further ahead than the pipeline is long, diagonals stay
    empty: a batch that takes no time and changes nothing.
    """

    def __init__(self, number: int, log: ReplicaLog, spans: Spans, records: Records) -> None:
        arrival = records.arrival_s[np.searchsorted(records.request_id, spans.requests)]
        self.number, self.log = number, log
        self.causes = causes(log, spans, arrival)
        stages, place = log.num_stages, -1
        enters: list[int] = []
        for after in self.causes.after.tolist():
            place += 1
            if after >= 0 and enters[after] + stages > place:
                place = enters[after] + stages
            enters.append(place)
        self.enters = np.array(enters, np.int64)
        self.returns = self.enters + stages - 1
        self.steps = place + stages if enters else 0
        after = self.causes.after
        waits = after >= 0
        self.reach = int((self.enters - self.returns[after])[waits].max(initial=1))
        self._batch_at = np.full(self.steps + 1, -1, np.int64)
        self._batch_at[self.enters] = np.arange(len(enters))

    def lay(
        self, begin: int, length: int, reach: int, extra: Extra, samples: int
    ) -> tuple[Floats, Floats, Ints, Floats]:
        """Diagonals ``begin`` and on: durations (length, stages, samples), transfers
        (length, stages - 1, samples), where in the window of returns the cause is, arrivals."""
        log, stages = self.log, self.log.num_stages
        # The batches under way: those that entered up to `stages - 1` diagonals before.
        diagonals = np.arange(begin - stages + 1, begin + length)
        inside = (diagonals >= 0) & (diagonals < self.steps)
        batch = np.where(inside, self._batch_at[np.where(inside, diagonals, 0)], -1)
        real = np.flatnonzero(batch >= 0)
        rows = batch[real]
        duration = np.zeros((length, stages, samples))
        send = np.zeros((length, stages - 1, samples))
        layer_d, first_d, last_d, send_d = extra(self.number, rows)
        columns = log.iterations
        layer = columns["layer_s"][rows]
        link = columns["send_s"][rows, None] + send_d
        for stage in range(stages):
            step = real + stage - (stages - 1)
            here = (step >= 0) & (step < length)
            recorded = log.layers[stage] * layer
            added = log.layers[stage] * layer_d
            if stage == 0:
                recorded, added = recorded + columns["first_s"][rows], added + first_d
            if stage == stages - 1:
                recorded, added = recorded + columns["last_s"][rows], added + last_d
            if log.stage_s is not None:  # jitter: what is added is stretched alike
                actual = log.stage_s[rows, stage]
                added = added * (actual / recorded)[:, None]
                recorded = actual
            time = recorded[:, None] + added
            duration[step[here], stage] = time[here]
            if stage < stages - 1:
                send[step[here], stage] = link[here]
        after = np.zeros(length, np.int64)
        arrived = np.full(length, -np.inf)
        entering = real >= stages - 1
        step, rows = real[entering] - (stages - 1), rows[entering]
        cause = self.causes.after[rows]
        after[step] = np.where(cause >= 0, 1 + reach + self.returns[cause] - begin, 0)
        arrived[step] = self.causes.arrived_s[rows]
        return duration, send, after, arrived
