"""The bubble ledger: every second of every stage by cause.

For each stage, to the bit (times are whole quanta)::

    wall = busy + sending + pb1 + pb2 + pb3 + equal + communication + turnaround
           + slowest_rank + fill + drain + no_work

The gap before micro-batch k on a stage is ``start[k] - release[k-1]``. Its end is booked as
*communication* for the time of the batch on the link (stages 1 and later), and as *turnaround* for
the delay by the scheduler's turn-around (stage 0). Of the rest, *no_work* is the time during which
the scheduler had no batch to run and fewer micro-batches were in flight than there are stages. What
remains is a pipeline bubble, named after the two batches around it (section 3.2 of the paper):

``pb1``    both hold prefill tokens, and different numbers of them
``pb2``    one holds prefill tokens, the other only decodes
``pb3``    both hold only decodes, of different number or context
``equal``  both hold the same number of prefill tokens, or only decodes alike in both respects

The names are descriptive, not causal: a prefill on an earlier stage may have caused the gap between
two decode batches. Before a stage's first batch, the time is no work until this batch is formed,
and then pipeline *fill*. After its last batch, it is pipeline *drain* until the replica is done,
and then no work. *sending* is the time that a transfer occupies its sender, with blocking sends; it
is not a bubble.

A rank with data-parallel attention has no pipeline. *slowest_rank* is what it waits for other
ranks: within a step, after its own work; and before its first batch after idle steps, from when it
has something to do until the others' step ends. A rank that has nothing to do has no work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sarathi_sim.policies.log import DECODE, PADDING, PART, PREFILL, RECOMPUTE
from ..loop.pipeline import stage_times
from ..loop.records import Floats, Ints, Records, ReplicaLog, StageTimes

Counts = npt.NDArray[np.int32]


class Spans:
    """One replica's spans, sorted by request (and by time within a request). ``requests`` are the
    distinct request ids, ascending. ``by_group`` lists the iterations' rows group by group;
    quantities per iteration are indexed in that order to sum them along a span."""

    def __init__(self, log: ReplicaLog) -> None:
        group = log.iterations["group"].astype(np.intp)
        self.by_group = np.argsort(group, kind="stable").astype(np.int32)
        self._counts = np.bincount(group, minlength=log.max_in_flight)
        del group  # a long run has millions of iterations
        offset = np.concatenate([[0], np.cumsum(self._counts)])

        # Column by column: a sorted copy of all would take as much memory as the log.
        order = np.argsort(log.spans[:, 0], kind="stable")
        self.role = log.spans[order, 1].astype(np.int8)
        start = offset[log.spans[order, 2]]
        self.first: Ints = start + log.spans[order, 3]  # positions in by_group
        self.last: Ints = start + log.spans[order, 4]
        self.requests, self.starts = np.unique(log.spans[order, 0], return_index=True)
        self.ends: Ints = np.append(self.starts, len(order))[1:] - 1
        self._finish = self._grouped(log.iterations["finish_s"])
        self._known = log.first_token_s

    def _grouped(self, per_iteration: Floats) -> Floats:
        """A quantity in the order of ``by_group``; unchanged if there is only one group."""
        alone = self._counts.max(initial=0) == len(per_iteration)
        return per_iteration if alone else np.asarray(per_iteration[self.by_group])

    @property
    def number(self) -> Ints:
        """For each row of the log, its iteration number within the group."""
        offset = np.cumsum(self._counts) - self._counts
        number = np.empty(len(self.by_group), np.int64)
        number[self.by_group] = np.arange(len(number)) - np.repeat(offset, self._counts)
        return number

    def finish_s(self) -> Floats:
        """When each request's last span ended."""
        return np.asarray(self._finish[self.last[self.ends]])

    def work_s(self, ready_s: Floats) -> tuple[Floats, Floats]:
        """Beginning and end of every span in which a request is served; ``ready_s`` by row."""
        served = self.role != PADDING
        begin_s = self._grouped(ready_s)[self.first[served]]
        return np.asarray(begin_s), np.asarray(self._finish[self.last[served]])

    def first_token_s(self) -> Floats:
        """When each request's first token came: its prompt was finished here, or its KV came from
        elsewhere."""
        prefill = np.where(self.role == PREFILL, self.last, -1)
        # Spans of a request are in order, so its last prefill span is the latest one; but positions
        # of different groups do not compare, hence the span's index and not its position.
        index = np.where(prefill >= 0, np.arange(len(prefill)), -1)
        found = np.maximum.reduceat(index, self.starts)
        first = np.asarray(self._finish[self.last[found]])
        elsewhere = np.flatnonzero(found < 0)
        if len(elsewhere):
            first[elsewhere] = self._before(self._yielding()[elsewhere])
        return first

    def _yielding(self) -> Ints:
        """The first span of each request that yields a token."""
        index = np.where(
            self.role != PART,
            np.arange(len(self.role)),
            len(self.role),
        )
        return np.minimum.reduceat(index, self.starts)

    def _before(self, spans: Ints) -> Floats:
        """When the first token of each request came that begins here with one of these spans: its
        prompt was computed elsewhere."""
        comes = np.asarray(self._finish[self._first_token(spans)])
        if self._known is None:
            return comes
        ids = self.requests[np.searchsorted(self.starts, spans, side="right") - 1]
        return np.array([self._known.get(i, at) for i, at in zip(ids.tolist(), comes, strict=True)])

    def first_row(self) -> Ints:
        """The iteration (row of the log) that carried each request's first chunk."""
        return np.asarray(self.by_group[self.first[self.starts]], np.int64)

    def total(self, per_iteration: Floats) -> Floats:
        """Sum of a quantity over the iterations that each request took part in. Exact for whole
        quanta, whose prefix sums and differences are exact."""
        until = np.zeros(len(per_iteration) + 1)
        np.cumsum(self._grouped(per_iteration), out=until[1:])
        along = until[self.last + 1] - until[self.first]
        return np.asarray(np.add.reduceat(along, self.starts))

    def token_gaps(self, since_s: float = -np.inf) -> tuple[Floats, Counts]:
        """Times between successive tokens of a request: distinct values, and how often each occurs.
        A decode yields a token, and so does the iteration that finishes the prompt. Gaps that end
        before ``since_s`` are left out."""
        decode = np.flatnonzero(self.role == DECODE)
        within = np.diff(self._finish, prepend=np.nan)
        weight = np.zeros(len(within) + 1, np.int32)
        np.add.at(weight, self.first[decode] + 1, 1)
        np.add.at(weight, self.last[decode] + 1, -1)
        weight = np.cumsum(weight, dtype=np.int32)[:-1]
        seen = (weight > 0) & (self._finish >= since_s)
        spans = np.union1d(decode, self._recomputed())
        entry = self._entry_gaps(spans[self._finish[self._first_token(spans)] >= since_s])
        gaps = np.concatenate([within[seen], entry])
        return gaps, np.concatenate([weight[seen], np.ones(len(entry), np.int32)])

    def longest_token_gap(self) -> Floats:
        """Each request's longest time between two tokens; NaN for requests of a single token."""
        decode = np.flatnonzero(self.role == DECODE)
        longest = np.full(len(self.role), -1.0)
        if len(decode):
            # reduceat takes [from, to) pairs at even places; a pair with from >= to yields the
            # single value at `from`, which is masked out. In order of `from`, what it reduces
            # between one pair and the next is short.
            within = np.append(np.diff(self._finish, prepend=0.0), 0.0)
            order = decode[np.argsort(self.first[decode])]
            pairs = np.stack([self.first[order] + 1, self.last[order] + 1], axis=1)
            inside = np.maximum.reduceat(within, pairs.ravel())[::2]
            longest[order] = np.where(pairs[:, 0] < pairs[:, 1], inside, -1.0)
            longest[decode] = np.maximum(longest[decode], self._entry_gaps(decode))
        again = self._recomputed()
        longest[again] = self._entry_gaps(again)
        result = np.maximum.reduceat(longest, self.starts)
        return np.where(result < 0, np.nan, result)

    def _recomputed(self) -> Ints:
        """The spans that recompute lost tokens and end with a new token."""
        return np.flatnonzero(self.role == RECOMPUTE)

    def _entry_gaps(self, spans: Ints) -> Floats:
        """Seconds from the token before each of these decode or recompute spans to its first token.
        The prefill yields a request's first token, so there is a token before, here or
        elsewhere."""
        yields = np.where(
            self.role != PART,
            np.arange(len(self.role)),
            -1,
        )
        before = np.maximum.accumulate(yields)[spans - 1]
        came = self._finish[self.last[before]]
        first = np.flatnonzero(np.isin(spans, self._yielding()))
        if len(first):
            came[first] = self._before(spans[first])
        return np.asarray(self._finish[self._first_token(spans)] - came)

    def _first_token(self, spans: Ints) -> Ints:
        """The position in ``by_group`` at which each of these spans yields its first token."""
        return np.where(
            self.role[spans] == DECODE,
            self.first[spans],
            self.last[spans],
        )


BUBBLES = ("pb1", "pb2", "pb3", "equal")
WAITS = (*BUBBLES, "communication", "turnaround", "slowest_rank")
"""The accounts that make up a request's bubble time."""
ACCOUNTS = ("busy", "sending", *WAITS, "fill", "drain", "no_work")


@dataclass(frozen=True)
class Gaps:
    """The idle time before each micro-batch on each stage by cause: seconds, (iterations, stages).

    ``kind`` indexes :data:`BUBBLES`, shape (iterations,); row 0 of everything but ``slowest_rank``
    is 0. That one holds the idle time within a step, too.
    A cause that never occurs takes no memory, and its array cannot be written.
    """

    times: StageTimes
    bubble: Floats
    communication: Floats
    turnaround: Floats
    no_work: Floats
    slowest_rank: Floats
    kind: np.ndarray[tuple[int], np.dtype[np.int8]]


def pair_kinds(log: ReplicaLog) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """For every micro-batch, the index in :data:`BUBBLES` of its pair with the one before."""
    columns = log.iterations
    prefill, decodes, context = (
        columns[name] for name in ("prefill_tokens", "decodes", "decode_context")
    )
    kind = np.zeros(log.num_iterations, np.int8)
    before, after = prefill[:-1] > 0, prefill[1:] > 0
    same_decodes = (decodes[:-1] == decodes[1:]) & (context[:-1] == context[1:])
    kind[1:] = np.select(
        [
            before & after & (prefill[:-1] == prefill[1:]),
            before & after,
            before | after,
            ~same_decodes,
        ],
        np.array([3, 0, 1, 2], np.int8),
        np.int8(3),
    )
    return kind


class StarvedTime:
    """Time until ``t`` during which there was too little work to fill the pipeline.

    That is while fewer micro-batches were in flight than there are stages (or than are allowed),
    although another one could have been formed. A batch is in flight from its formation until the
    scheduler has handled its return.
    """

    def __init__(self, log: ReplicaLog, times: StageTimes) -> None:
        ready = log.iterations["ready_s"]
        back = log.iterations["finish_s"] + log.switches.turnaround_s
        enough = min(log.max_in_flight, log.num_stages)
        instants = [ready, back]
        changes = [np.ones(len(ready), np.int32), -np.ones(len(back), np.int32)]
        if log.switches.lazy:
            # A batch is formed only when stage 0 is free: while it is busy nothing is missing.
            instants += [times.start[:, 0], times.release[:, 0]]
            changes += [enough * changes[0], enough * changes[1]]
        when = np.concatenate(instants)
        order = np.argsort(when, kind="stable")
        starved = np.cumsum(np.concatenate(changes)[order], dtype=np.int32) < enough
        turns = np.flatnonzero(np.diff(starved, prepend=~starved[:1]))  # where it begins or ends
        self._when = when[order[turns]]
        # Between two turns the starved seconds are slope * t + until (whole quanta, so exact).
        self._slope = np.append(0.0, starved[turns])
        until = np.zeros(len(turns))
        np.cumsum(np.diff(self._when) * self._slope[1:-1], out=until[1:])
        self._until = np.append(0.0, until - self._slope[1:] * self._when)

    def __call__(self, t: Floats) -> Floats:
        """Starved seconds before each ``t``, counted from the first batch on."""
        index = np.searchsorted(self._when, t, side="right")
        return np.asarray(self._slope[index] * t + self._until[index])


def gaps(log: ReplicaLog) -> Gaps:
    """Split the idle time before every micro-batch on every stage by cause."""
    times = stage_times(log)
    rest = np.empty_like(times.start)
    communication = turnaround = no_work = nothing = np.broadcast_to(0.0, rest.shape)
    rest[:1] = 0.0
    sent = None
    if log.num_stages > 1 and not log.switches.blocking_send:
        sent = log.iterations["send_s"][1:]
        communication = np.zeros_like(rest)
    starved = None
    for stage in range(log.num_stages):  # laid out as the times are: what follows goes along it
        gap = rest[1:, stage]
        np.subtract(
            times.start[1:, stage],
            times.release[:-1, stage],
            out=gap,
        )
        if stage and sent is not None:
            gap -= np.minimum(gap, sent, out=communication[1:, stage])
        elif not stage and log.switches.turnaround_s:
            turnaround = np.zeros_like(rest)
            turnaround[:, 0] = np.where(
                _just_returned(log), np.minimum(rest[:, 0], log.switches.turnaround_s), 0
            )
            gap -= turnaround[1:, 0]
        waits = np.flatnonzero(gap)
        if len(waits):
            if starved is None:
                starved, no_work = StarvedTime(log, times), np.zeros_like(rest)
            released = times.release[waits, stage]
            ends = starved(np.concatenate([released, released + gap[waits]]))
            missing = ends[len(waits) :] - ends[: len(waits)]
            no_work[1:, stage][waits] = missing
            gap[waits] -= missing
    slowest = nothing
    if (waited := log.waited_s) is not None:
        late = times.start[:, 0] - log.iterations["ready_s"]
        late[1:] = np.minimum(late[1:], times.start[1:, 0] - times.release[:-1, 0])
        turnaround = turnaround + rest - np.pad(late[1:], (1, 0))[:, None]
        rest, slowest = nothing, (late + waited)[:, None]
    return Gaps(times, rest, communication, turnaround, no_work, slowest, pair_kinds(log))


def _just_returned(log: ReplicaLog) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether a batch was formed at the instant when its group's previous batch returned."""
    group, ready = log.iterations["group"], log.iterations["ready_s"]
    back = log.iterations["finish_s"] + log.switches.turnaround_s
    order = np.argsort(group, kind="stable")
    found = np.zeros(len(group), np.bool_)
    same = group[order][1:] == group[order][:-1]
    found[order[1:]] = same & (ready[order][1:] == back[order][:-1])
    return found


def ledger(records: Records, splits: Sequence[Gaps]) -> dict[str, Floats | Ints]:
    """One row per replica and stage: seconds spent in each of the ledger's accounts.

    ``splits`` are the :func:`gaps` of the replicas.

    Columns: replica, stage, ``wall_s`` (0 until the last replica is done), and those of
    :data:`ACCOUNTS` with the suffix ``_s``. The accounts add up to the wall exactly.
    """
    end, logs = records.end_s, records.replicas
    stages = [log.num_stages for log in logs]
    parts = [
        _accounts(log, splits[number], end) if log.num_iterations else {"no_work": end}
        for number, log in enumerate(logs)
    ]
    return {
        "replica": np.repeat(np.arange(len(logs)), stages),
        "stage": np.concatenate([np.arange(count) for count in stages]),
        "wall_s": np.full(sum(stages), end),
        **{
            f"{name}_s": np.concatenate(
                [
                    np.broadcast_to(np.float64(part.get(name, 0.0)), count)
                    for part, count in zip(parts, stages, strict=True)
                ]
            )
            for name in ACCOUNTS
        },
    }


def _accounts(log: ReplicaLog, split: Gaps, end: float) -> dict[str, Floats | float]:
    times = split.times
    first_ready = log.iterations["ready_s"][0]
    done = times.finish[-1, -1]
    occupied = (times.release - times.start).sum(axis=0)
    fill = times.start[0] - first_ready
    if log.waited_s is not None:  # a rank waits for others in its account of that name
        fill, occupied = np.zeros(1), occupied - log.waited_s.sum()
    sending = times.finish is not times.release
    busy = (times.finish - times.start).sum(axis=0) if sending else occupied
    kind = split.kind.astype(np.intp)
    bubbles = [np.bincount(kind, waits, len(BUBBLES)) for waits in split.bubble.T]
    return {
        "busy": busy,
        "sending": occupied - busy,
        **dict(zip(BUBBLES, np.transpose(bubbles), strict=True)),
        "communication": split.communication.sum(axis=0),
        "turnaround": split.turnaround.sum(axis=0),
        "slowest_rank": split.slowest_rank.sum(axis=0),
        "fill": fill,
        "drain": done - times.release[-1],
        "no_work": split.no_work.sum(axis=0) + first_ready + (end - done),
    }


def iteration_bubbles(split: Gaps, cause: str = "bubble") -> Floats:
    """For every micro-batch, the idle seconds before it, summed over the stages. ``bubble`` is all
    idle time but fill, drain and no-work; the other causes are its :data:`WAITS`."""
    if cause in WAITS and cause not in BUBBLES:
        return _over_stages(getattr(split, cause))
    bubble = _over_stages(split.bubble)
    if cause in BUBBLES:
        return np.where(split.kind == BUBBLES.index(cause), bubble, 0.0)
    bubble = bubble + _over_stages(split.communication) + _over_stages(split.turnaround)
    return bubble + _over_stages(split.slowest_rank)


def _over_stages(seconds: Floats) -> Floats:
    if not any(seconds.strides):  # a cause that never occurs
        return np.zeros(len(seconds))
    return np.asarray(seconds.sum(axis=1) if seconds.shape[1] > 1 else seconds[:, 0])
