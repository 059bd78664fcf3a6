"""From spans (runs of a group's iterations) to per-request quantities, without expanding them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sarathi_sim.policies.log import DECODE, PADDING, PART, PREFILL, RECOMPUTE
from ..loop.records import Floats, Ints, ReplicaLog

Counts = npt.NDArray[np.int32]


class Spans:
    """One replica's spans, sorted by request (and by time within a request).

    ``requests`` are the distinct request ids, ascending. ``by_group`` lists the iterations' rows
    group by group; quantities per iteration are indexed in that order to sum them along a span.
    """

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
        index = np.where(self.role != PART, np.arange(len(self.role)), len(self.role))
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
        """Sum of a quantity over the iterations that each request took part in.

        Exact for whole quanta, whose prefix sums and differences are exact.
        """
        until = np.zeros(len(per_iteration) + 1)
        np.cumsum(self._grouped(per_iteration), out=until[1:])
        along = until[self.last + 1] - until[self.first]
        return np.asarray(np.add.reduceat(along, self.starts))

    def token_gaps(self, since_s: float = -np.inf) -> tuple[Floats, Counts]:
        """Times between successive tokens of a request: distinct values, and how often each occurs.

        A decode yields a token, and so does the iteration that finishes the prompt. Gaps that end
        before ``since_s`` are left out.
        """
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

        The prefill yields a request's first token, so there is a token before, here or elsewhere.
        """
        yields = np.where(self.role != PART, np.arange(len(self.role)), -1)
        before = np.maximum.accumulate(yields)[spans - 1]
        came = self._finish[self.last[before]]
        first = np.flatnonzero(np.isin(spans, self._yielding()))
        if len(first):
            came[first] = self._before(spans[first])
        return np.asarray(self._finish[self._first_token(spans)] - came)

    def _first_token(self, spans: Ints) -> Ints:
        """The position in ``by_group`` at which each of these spans yields its first token."""
        return np.where(self.role[spans] == DECODE, self.first[spans], self.last[spans])
