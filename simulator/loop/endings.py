"""The end of each request, from the true output lengths, which no scheduler may see."""

from __future__ import annotations

from collections.abc import Mapping

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Cohort, Sequence


class OutputLengths:
    """Tells a pool which sequences end with an iteration
    (:class:`~sarathi_sim.policies.pool.Endings`).

    ``output_tokens`` are the true lengths, by request. A sequence that decodes yields a token in
    every iteration of its cohort, so the iteration that yields its last one is known when it joins.
    """

    def __init__(self, output_tokens: Mapping[int, int]) -> None:
        self._output_tokens = output_tokens
        self._due: dict[tuple[int, int], list[Sequence]] = {}

    def _last(self, sequence: Sequence) -> int:
        """The iteration of its cohort in which a sequence ends."""
        # The one with context C yields token C + 2 - prompt.
        return self._output_tokens[sequence.id] + sequence.prompt_tokens - 2 - sequence.offset

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes from the cohort's next iteration on."""
        last = self._last(sequence)
        if last >= cohort.iteration:
            self._due.setdefault((cohort.index, last), []).append(sequence)

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence that has not ended decodes no longer in iterations that are not formed."""
        last = self._last(sequence)
        if last >= cohort.iteration:
            self._due[cohort.index, last].remove(sequence)

    def ended(self, batch: Batch) -> list[Sequence]:
        """Those whose last token came with this batch."""
        found = self._due.pop((batch.slot, batch.iteration), None) or []
        if batch.yields:
            for sequence, tokens, context in batch.chunks:
                # Whoever yields has no token left to process.
                token = context + tokens + 1 - sequence.prompt_tokens
                if token == self._output_tokens[sequence.id]:
                    found.append(sequence)
        return found
