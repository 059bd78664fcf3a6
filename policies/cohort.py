"""Sequences that decode together, counted so that an iteration costs the same whatever their
number.

Every iteration each member's context grows by one token, so a member's context minus the cohort's
``iteration`` stays constant (its ``offset``). Which members open a new KV block in an iteration
depends only on ``(offset + iteration) mod block_size``: they are kept by that phase.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass, field

from policies.request import Sequence


@dataclass(slots=True, eq=False)
class Cohort:
    """The decoding sequences of one slot.

    ``iteration``   the next one to be formed
    ``outstanding`` how many formed ones have not returned
    ``opens``       the scheduling step from which on the next one may be formed
    ``context``     KV tokens of the members before the next iteration, summed
    ``members``     in the order of joining, each with the first iteration it decodes in
    ``keys``        gives them without it
    ``offsets``     of the members, ascending
    ``stops``       by iteration, the members that will have all the tokens they may then
    """

    index: int
    _block_size: int
    iteration: int = 0
    outstanding: int = 0
    opens: int = 0
    context: int = 0
    members: dict[Sequence, int] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)
    stops: dict[int, list[Sequence]] = field(default_factory=dict)
    keys: Callable[[], KeysView[Sequence]] = field(init=False)
    _phases: list[dict[Sequence, None]] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.members.keys
        self._phases = [{} for _ in range(self._block_size)]

    def __len__(self) -> int:
        return len(self.members)

    def context_of(self, sequence: Sequence, iteration: int | None = None) -> int:
        """KV tokens a member holds before an iteration: the next one, or the one given."""
        return sequence.offset + (self.iteration if iteration is None else iteration)

    def at_block_end(self, ahead: int = 0) -> dict[Sequence, None]:
        """Members whose context is a multiple of the block size, ``ahead`` iterations from now."""
        return self._phases[(self.iteration + ahead) % self._block_size]

    def join(self, sequence: Sequence, context: int) -> None:
        """Let a sequence that holds ``context`` tokens decode from the next iteration on."""
        offset = sequence.offset = context - self.iteration
        self.members[sequence] = self.iteration
        self.context += context
        insort(self.offsets, offset)
        self._phases[-offset % self._block_size][sequence] = None

    def leave(self, sequence: Sequence) -> int:
        """Take a member out; returns its context."""
        del self.members[sequence]
        offset = sequence.offset
        context = offset + self.iteration
        self.context -= context
        del self.offsets[bisect_left(self.offsets, offset)]
        del self._phases[-offset % self._block_size][sequence]
        return context

    def members_at(self, iteration: int) -> list[Sequence]:
        """Those of the members who decode in an iteration."""
        return [sequence for sequence, first in self.members.items() if first <= iteration]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.members)
