"""Which sequences have ended: all that a driver tells its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Cohort, Request, Sequence

Acceptance = Callable[[int, int, int], int]
"""How many drafts hold, from a request's id, its tokens so far, and the number of drafts."""


class Endings(Protocol):
    """The ends of sequences. A simulator knows the output lengths; a real engine sees tokens."""

    def added(self, request: Request) -> None:
        """A request was accepted."""

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes from the cohort's next iteration on."""

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        """An unfinished sequence stops decoding from the cohort's next iteration on."""

    def preempted(self, sequence: Sequence) -> None:
        """A sequence has to compute its tokens again, and may end with a chunk of them."""

    def accepted(self, sequence: Sequence, drafts: int) -> int:
        """How many of its ``drafts`` hold in the decode that returns; its ``target`` tokens are
        known before it."""

    def ended(self, batch: Batch, dropped: Collection[Sequence] = ()) -> list[Sequence]:
        """The sequences whose last token this batch yields; ``dropped`` ones lose theirs."""

    def none_end(self, batch: Batch) -> int:
        """In how many iterations from this batch on, all of decodes, nobody ends for sure."""


class OutputLengths:
    """The :class:`Endings` of a simulation, from the requests' true output lengths.

    A sequence that decodes yields a token in every iteration of its cohort, so the iteration that
    yields its last one is known when it joins. How many drafts hold is what ``acceptance`` says,
    from the request, its tokens so far and the number of drafts (None: none hold); drafts beyond
    its last token never do.
    """

    def __init__(self, acceptance: Acceptance | None = None) -> None:
        self._acceptance = acceptance
        # By request, the position of the last token it processes, which yields its last output.
        self._position: dict[int, int] = {}
        self._due: dict[tuple[int, int], list[Sequence]] = {}  # by slot and iteration
        self._with_chunks = False  # whether a chunk has ever been able to yield a last token

    def added(self, request: Request) -> None:
        """A request was accepted."""
        self._position[request.id] = request.prompt_tokens + request.output_tokens - 2
        self._with_chunks = self._with_chunks or request.output_tokens == 1

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes from the cohort's next iteration on."""
        last = self._position[sequence.id] - sequence.offset
        if last >= cohort.iteration:
            self._due.setdefault((cohort.index, last), []).append(sequence)

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        """An unfinished sequence stops decoding from the cohort's next iteration on."""
        last = self._position[sequence.id] - sequence.offset
        if last >= cohort.iteration:
            self._due[cohort.index, last].remove(sequence)

    def preempted(self, sequence: Sequence) -> None:
        """A sequence has to compute its tokens again, and may end with a chunk of them."""
        self._with_chunks = True

    def accepted(self, sequence: Sequence, drafts: int) -> int:
        """How many of its ``drafts`` hold in the decode that returns."""
        last = self._position.get(sequence.id)
        if last is None or self._acceptance is None:
            return 0
        held = self._acceptance(sequence.id, sequence.target, drafts)
        return min(held, last + 1 - sequence.target)

    def none_end(self, batch: Batch) -> int:
        """In how many iterations from this batch on, all of decodes, nobody ends for sure."""
        first, slot = batch.iteration, batch.slot
        ends = (last for of, last in self._due if of == slot and last >= first)
        return min(ends, default=first) - first

    def ended(self, batch: Batch, dropped: Collection[Sequence] = ()) -> list[Sequence]:
        """The sequences whose last token this batch yields; ``dropped`` ones lose theirs."""
        found = self._due.pop((batch.slot, batch.iteration), None)
        if batch.yields and self._with_chunks:
            for sequence, tokens, context in batch.chunks:
                if context + tokens - 1 == self._position.get(sequence.id):
                    found = [*(found or ()), sequence]
        for sequence, _, _ in batch.verified:
            last = self._position.get(sequence.id)
            if last is not None and sequence.target == last + 2:
                found = [*(found or ()), sequence]
        if found is None:
            return []
        if dropped:
            found = [sequence for sequence in found if sequence not in dropped]
        for sequence in found:
            del self._position[sequence.id]
        return found
