"""The decoding sequences of a pool: in which cohort each is, what of it is out, and what is known.

An iteration is *out* from when it is formed until it returns. Where iterations are formed ahead, a
sequence may decode in several that are out, and may have moved to another slot meanwhile.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from policies.batch import Batch
from policies.cohort import Cohort
from policies.kv import Blocks
from policies.policy import PoolPolicy
from policies.request import Sequence
from policies.scheduler import DECODE, span


class Endings(Protocol):
    """The ends of sequences, from the driver: only it knows the output lengths or sees the
    tokens."""

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes from the cohort's next iteration on."""

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence that has not ended stops decoding, from the next iteration to be formed on."""

    def ended(self, batch: Batch) -> list[Sequence]:
        """The sequences whose last token came with this batch."""


@dataclass(slots=True, eq=False)
class Decodes:
    """The cohorts of one replica.

    ``step`` is how often an iteration was formed; ``spans`` the log of who took part in what.
    """

    policy: PoolPolicy
    blocks: Blocks
    _: KW_ONLY
    max_in_flight: int = 1
    max_length: int
    stages: int = 1
    endings: Endings
    step: int = field(init=False, default=0)
    cohorts: list[Cohort] = field(init=False, default_factory=list)
    spans: array[int] = field(init=False, default_factory=lambda: array("q"))
    # Of those that decode, the ones all of whose tokens are scheduled (they run until the last
    # one is back): the first iteration they decoded in, and the one they would have been next in.
    _draining: dict[Sequence, tuple[int, int]] = field(init=False, default_factory=dict)
    # Iterations in which a sequence decoded before it moved to another slot, while in flight.
    _abroad: dict[Sequence, list[tuple[int, int]]] = field(init=False, default_factory=dict)
    # With iterations formed ahead: the number of each one that is out, by slot and iteration;
    # and those that returned last, with the number of iterations formed by then.
    _num_formed: int = field(init=False, default=0)
    _formed_as: dict[tuple[int, int], int] = field(init=False, default_factory=dict)
    _returns: deque[tuple[int, Batch]] = field(init=False)

    def __post_init__(self) -> None:
        self._returns = deque(maxlen=self.max_in_flight)

    def _free_cohort(self, taken: Cohort | None = None) -> Cohort:
        """A slot with no members and nothing in flight."""
        for cohort in self.cohorts:
            if not cohort.members and not cohort.outstanding and cohort is not taken:
                return cohort
        self.cohorts.append(Cohort(len(self.cohorts), self.blocks.block_size))
        return self.cohorts[-1]

    def _gather(self) -> Cohort:
        """Merge all sequences that could decode now into the largest cohort; returns it."""
        ahead, step = self.policy.ahead, self.step
        largest, ready = None, []
        for cohort in self.cohorts:
            if cohort.members and (cohort.opens <= step if ahead else not cohort.outstanding):
                ready.append(cohort)
                if largest is None or len(cohort.members) > len(largest.members):
                    largest = cohort
        if largest is None:
            return self._free_cohort()
        for cohort in ready:
            if cohort is not largest:
                for sequence in list(cohort):
                    self._move(sequence, largest)
        if largest.stops:
            self._drain(largest)
        return largest

    def _drain(self, cohort: Cohort) -> None:
        """Take out those all of whose tokens are scheduled."""
        for sequence in cohort.stops.pop(cohort.iteration, ()):
            # (It may have been preempted, and have come again with a later stop, meanwhile.)
            first = cohort.members.get(sequence)
            if first is not None and self._stop(sequence) <= cohort.iteration:
                self._draining[sequence] = (first, cohort.iteration)
                cohort.leave(sequence)

    def _join(self, sequence: Sequence, cohort: Cohort, context: int) -> None:
        cohort.join(sequence, context)
        sequence.cohort = cohort
        self.endings.joined(sequence, cohort)
        if self.policy.ahead:
            stop = max(self._stop(sequence), cohort.iteration)
            cohort.stops.setdefault(stop, []).append(sequence)

    def _stop(self, sequence: Sequence) -> int:
        """The iteration before which all tokens that a decoding sequence may have are scheduled."""
        most = min(sequence.prompt_tokens + sequence.max_tokens, self.max_length)
        return most - 1 - sequence.offset

    def _leave(self, sequence: Sequence, last: int | None = None) -> int:
        """Take a sequence from where it decodes; returns its context.

        If it has ended, ``last`` is the iteration that its span ends with, if it took part in that.
        """
        cohort, sequence.cohort = sequence.cohort, None
        assert cohort is not None
        if last is None:
            self.endings.left(sequence, cohort)
        if self._abroad:
            self._abroad.pop(sequence, None)
        if self._draining and sequence in self._draining:
            first, stop = self._draining.pop(sequence)
            context = sequence.offset + stop
        else:
            first, stop = cohort.members[sequence], cohort.iteration
            context = cohort.leave(sequence)
        if last is None or last >= stop:
            last = stop - 1
        if last >= first:
            self.spans.frombytes(span(sequence.id, DECODE, cohort.index, first, last))
        return context

    def _move(self, sequence: Sequence, to: Cohort) -> None:
        out = self._out(sequence)
        self._join(sequence, to, self._leave(sequence))
        if out:
            self._abroad[sequence] = out

    def _out(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Slot and iteration of every decode of a sequence that has not returned."""
        cohort = sequence.cohort
        assert cohort is not None
        stop = cohort.iteration
        if sequence in self._draining:
            first, stop = self._draining[sequence]
        else:
            first = cohort.members[sequence]
        oldest = cohort.iteration - cohort.outstanding
        out = [
            (slot, iteration)
            for slot, iteration in self._abroad.get(sequence, ())
            if iteration >= self.cohorts[slot].iteration - self.cohorts[slot].outstanding
        ]
        return out + [(cohort.index, i) for i in range(max(first, oldest), stop)]

    def _returned(self, sequence: Sequence) -> int:
        """Tokens of a decoding sequence that are processed and known: what is out is left out."""
        cohort = sequence.cohort
        assert cohort is not None
        _, stop = self._draining.get(sequence, (0, cohort.iteration))
        return sequence.offset + stop - len(self._out(sequence)) - sequence.yielding

    def _scheduled_last(self, sequence: Sequence) -> bool:
        """Whether a decode of a sequence was scheduled after its last token returned."""
        cohort = sequence.cohort
        assert cohort is not None
        first, stop = self._draining.get(sequence, (cohort.members.get(sequence, 0), 0))
        stop = stop or cohort.iteration
        abroad = self._abroad.get(sequence, [])
        last = (cohort.index, stop - 1) if stop > first else ((-1, -1), *abroad)[-1]
        number = self._formed_as.get(last)
        if number is None:
            return False

        def took_part(batch: Batch) -> bool:
            here = batch.slot == cohort.index and first <= batch.iteration < stop
            return here or (batch.slot, batch.iteration) in abroad or sequence in batch.yields

        later = (batch for formed, batch in self._returns if formed >= number)
        return not any(map(took_part, later))

    def _enter_returned(self, cohort: Cohort, more: int = 0) -> None:
        """Note which blocks of generated tokens are known now, in the order of admission.

        With ``more`` 1 the cohort's members decode now, and the token that came last counts too.
        """
        sharing = self.blocks.sharing
        filled = cohort.at_block_end(more - cohort.outstanding)
        found = {each for each in (*filled, *self._abroad, *self._draining) if each in sharing}
        for sequence in sorted(found, key=by_admission):
            if not more or sequence in cohort.members:
                self.blocks.enter(sequence, self._returned(sequence) + more)


def by_admission(sequence: Sequence) -> int:
    """The key that sorts sequences by admission."""
    return sequence.order
