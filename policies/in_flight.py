"""Which slot each sequence of a pool decodes in, its decodes in flight, and its known tokens.

An iteration is *out* (in flight) from when it is formed until it returns. Where iterations are
formed ahead, a sequence may decode in several of them, and may have changed its slot meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass, field

from .batch import Batch
from .log import PART
from .request import Cohort, Sequence
from .scheduler import Scheduler


@dataclass(slots=True, eq=False)
class InFlight(Scheduler):
    """The decodes of a :class:`~sarathi_sim.policies.pool.Pool`.

    ``step``         number of iterations formed
    ``draft_length`` tokens drafted for each decode
    """

    _: KW_ONLY
    draft_length: int = 0
    step: int = field(init=False, default=0)
    cohorts: list[Cohort] = field(init=False, default_factory=list)
    # Iterations in which a sequence decoded before it moved to another slot, while in flight.
    _abroad: dict[Sequence, list[tuple[int, int]]] = field(init=False, default_factory=dict)
    # With iterations formed ahead: by slot and iteration, the number of each iteration in flight;
    # and the batches that returned last, with the number of iterations formed by then.
    _num_formed: int = field(init=False, default=0)
    _formed_as: dict[tuple[int, int], int] = field(init=False, default_factory=dict)
    _returns: deque[tuple[int, Batch]] = field(init=False)

    def __post_init__(self) -> None:
        Scheduler.__post_init__(self)
        self._returns = deque(maxlen=self.max_in_flight)

    def _free_cohort(self, taken: Cohort | None = None) -> Cohort:
        """A slot with no members and nothing in flight; with speculation there is one slot."""
        if self.draft_length and self.cohorts:
            return self.cohorts[0]
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
        """Take out the sequences whose tokens are all scheduled."""
        for sequence in cohort.stops.pop(cohort.iteration, ()):
            # (It may have been preempted, and have joined again with a later stop, meanwhile.)
            if sequence in cohort.members and self._stop(sequence) <= cohort.iteration:
                cohort.drain(sequence)

    def _join(self, sequence: Sequence, cohort: Cohort, context: int) -> None:
        Scheduler._join(self, sequence, cohort, context)
        if self.policy.ahead:
            stop = max(self._stop(sequence), cohort.iteration)
            cohort.stops.setdefault(stop, []).append(sequence)

    def _stop(self, sequence: Sequence) -> int:
        """The iteration before which a decoding sequence's last possible token is scheduled."""
        most = min(sequence.prompt_tokens + sequence.max_tokens, self.max_length)
        return most - 1 - sequence.offset

    def _leave(self, sequence: Sequence, last: int | None = None, dropped: int = 0) -> int:
        self._abroad.pop(sequence, None)
        return Scheduler._leave(self, sequence, last, dropped)

    def _yields_nothing(self, sequence: Sequence) -> None:
        """The token of its chunks in flight is lost: their span is not one that yields it."""
        rows = range(len(self.spans) - 5, -1, -5)
        at = next(row for row in rows if self.spans[row] == sequence.id)
        self.spans[at + 1] = PART

    def _move(self, sequence: Sequence, to: Cohort) -> None:
        out = self._out(sequence)
        Scheduler._move(self, sequence, to)
        if out:
            self._abroad[sequence] = out

    def _out(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Slot and iteration of every decode of a sequence that is in flight."""
        cohort = sequence.cohort
        assert cohort is not None
        first, stop = cohort.part(sequence)
        oldest = cohort.iteration - cohort.outstanding
        out = [
            (slot, iteration)
            for slot, iteration in self._abroad.get(sequence, ())
            if iteration >= self.cohorts[slot].iteration - self.cohorts[slot].outstanding
        ]
        return out + [(cohort.index, i) for i in range(max(first, oldest), stop)]

    def _returned(self, sequence: Sequence) -> int:
        """Processed and known tokens of a decoding sequence, without those in flight."""
        cohort = sequence.cohort
        assert cohort is not None
        return cohort.context_of(sequence) - len(self._out(sequence)) - sequence.yielding

    def _scheduled_last(self, sequence: Sequence) -> bool:
        """Whether a decode of a sequence was scheduled after its last token returned."""
        cohort = sequence.cohort
        assert cohort is not None
        first, stop = cohort.part(sequence)
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
        """Note the blocks of generated tokens that are known now, in the order of admission. With
        ``more`` 1 the cohort's members decode now, and their latest token counts, too."""
        sharing = self.blocks.sharing
        filled = cohort.at_block_end(more - cohort.outstanding)
        drained = (each for home in self.cohorts for each in home.drained)
        found = {each for each in (*filled, *self._abroad, *drained) if each in sharing}
        for sequence in sorted(found, key=by_admission):
            if not more or sequence in cohort.members:
                self.blocks.enter(sequence, self._returned(sequence) + more)


def by_admission(sequence: Sequence) -> int:
    """The key that sorts sequences by admission."""
    return sequence.order
