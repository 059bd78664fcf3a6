"""The steps of ranks with data-parallel attention, to be re-timed as the batches of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..loop.pipeline import stage_times
from ..loop.records import Floats, Ints, ReplicaLog
from ..views.ledger import Spans
from .retime import Extra

_PARTS = ("layer_s", "first_s", "last_s", "send_s")


class Steps:
    """The steps of one replica's ranks, at least one of which has served. ``log`` has a row for
    each step, and takes of each part of an iteration the longest of its ranks; ``spans`` are those
    of all ranks, by step."""

    def __init__(self, logs: Sequence[ReplicaLog], all_spans: Sequence[Spans]) -> None:
        times = [np.hstack([t.start, t.finish]) for t in map(stage_times, logs)]
        steps, which = np.unique(np.vstack(times), axis=0, return_inverse=True)
        of_rank = np.split(which.ravel(), np.cumsum([len(each) for each in times])[:-1])
        self._logs = logs
        self._rows = np.full((len(logs), len(steps)), -1)  # of each rank's log, by step
        for row, mine in zip(self._rows, of_rank, strict=True):
            row[mine] = np.arange(len(mine))
        first, depth = logs[0], logs[0].max_in_flight
        nothing = np.zeros((len(steps), 1))
        self._longest = [part[:, 0] for part in self._of_steps(lambda *_: (nothing[:1],) * 4)]
        # No step is formed before the one that makes room for it is back, however long ago a
        # rank's requests arrived.
        ready = self._ready_s()
        back = steps[:, 1] + first.switches.turnaround_s
        ready[depth:] = np.maximum(ready[depth:], back[:-depth])
        columns = dict(zip(_PARTS, self._longest, strict=True))
        columns |= {"group": nothing[:, 0], "ready_s": ready, "finish_s": steps[:, 1]}
        spans = [
            np.stack(
                [
                    np.repeat(each.requests, each.ends - each.starts + 1),
                    each.role,
                    np.zeros(len(each.role)),
                    mine[each.by_group[each.first]],
                    mine[each.by_group[each.last]],
                ],
                axis=1,
            ).astype(np.int64)
            for each, mine in zip(all_spans, of_rank, strict=True)
        ]
        takes_s = None if first.stage_s is None else np.diff(steps)
        self.log = replace(first, iterations=columns, stage_s=takes_s, spans=np.vstack(spans))
        self.spans = Spans(self.log)

    def extra(self, of: Extra, _: int, rows: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """What each sample adds to the steps ``rows``, if it adds ``of(rank, rows)`` to the ranks'
        own times."""
        slower = self._of_steps(of, rows)
        parts = [new - old[rows, None] for new, old in zip(slower, self._longest, strict=True)]
        return parts[0], parts[1], parts[2], parts[3]

    def _of_steps(self, of: Extra, rows: Ints | None = None) -> list[Floats]:
        """The longest of the ranks' own parts with what is added; (steps, samples) each."""
        found: list[Floats] = []
        steps = np.arange(self._rows.shape[1]) if rows is None else rows
        for rank, log in enumerate(self._logs):
            own = self._rows[rank, steps]
            there = np.flatnonzero(own >= 0)
            for part, (name, added) in enumerate(zip(_PARTS, of(rank, own[there]), strict=True)):
                if len(found) == part:
                    found.append(np.zeros((len(steps), added.shape[1])))
                time_s = log.iterations[name][own[there], None] + added
                found[part][there] = np.maximum(found[part][there], time_s)
        return found

    def _ready_s(self) -> Floats:
        """When the last rank was ready, by step."""
        found = np.zeros(self._rows.shape[1])
        for rows, log in zip(self._rows, self._logs, strict=True):
            there = rows >= 0
            found[there] = np.maximum(found[there], log.iterations["ready_s"][rows[there]])
        return found
