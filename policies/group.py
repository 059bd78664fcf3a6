"""The members of one micro-batch, counted so that an iteration costs O(1)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, KeysView
from dataclasses import InitVar, dataclass, field

from sarathi_sim.policies.policy import View
from sarathi_sim.policies.request import Sequence


@dataclass(slots=True, eq=False)
class Group:
    """A micro-batch's members between iterations.

    Every iteration each decoding member's context grows by one token, so only sums are kept: the
    number of decodes, their summed context, the order of their contexts (``offsets``), and for each
    member the last iteration it takes part in, bucketed in ``due``. The cost of an iteration
    therefore does not grow with the batch. A member is touched only when it joins, finishes, skips
    an iteration or moves.

    ``iteration`` is the index of the iteration that is in flight, or next to be formed.
    """

    index: int
    waiting: InitVar[deque[Sequence]]
    max_batch: InitVar[int]
    iteration: int = 0
    prefilling: list[Sequence] = field(default_factory=list)
    # Policies see the keys of this one, hence it maps to nothing: the last iteration would
    # tell them the true output length.
    decoding: dict[Sequence, None] = field(default_factory=dict)
    last_iteration: dict[Sequence, int] = field(default_factory=dict)  # of each decoding member
    num_decodes: int = 0  # the decoding members, and the held ones
    context: int = 0  # KV tokens of those, summed
    # Each decoding member's context less ``iteration``, ascending. It stays as it is, as both
    # grow by one. Moving the tail of a short list is quicker than keeping a heap.
    offsets: list[int] = field(default_factory=list)
    due: dict[int, list[Sequence]] = field(default_factory=dict)
    # Finished, but kept as padding until all are: each still computes a token an iteration,
    # against the context it ended with.
    held: list[Sequence] = field(default_factory=list)
    held_longest: int = 0  # the largest context among those
    # For a Batch: all who decode, in the order of joining.
    members: Callable[[], KeysView[Sequence]] = field(init=False)
    view: View = field(init=False)

    def __post_init__(self, waiting: deque[Sequence], max_batch: int) -> None:
        self.members = self.decoding.keys
        self.view = View(waiting, self.prefilling, self.decoding.keys(), max_batch)

    @property
    def size(self) -> int:
        """Members, held ones included: each takes a slot."""
        return len(self.prefilling) + self.num_decodes

    def join(self, sequence: Sequence, context: int, decodes: int, first: int) -> None:
        """Let a sequence decode from iteration ``first`` on, ``decodes`` times in all.

        ``context`` is the KV tokens it holds by then. With ``decodes`` 0 it is due at once.
        """
        last = first + decodes - 1
        self.decoding[sequence] = None
        self.last_iteration[sequence] = last
        self.num_decodes += 1
        self.context += context
        insort(self.offsets, context - first)
        self.due.setdefault(last, []).append(sequence)

    def postpone(self, sequence: Sequence, context: int) -> None:
        """Shift a decoding member's remaining iterations back by one.

        Its ``context``, which does not grow meanwhile, was taken out of the order before.
        """
        insort(self.offsets, context - self.iteration - 1)
        last = self.last_iteration[sequence]
        self._forget_due(sequence, last)
        self.last_iteration[sequence] = last + 1
        self.due.setdefault(last + 1, []).append(sequence)

    def end(self, sequence: Sequence, iteration: int) -> int:
        """Make an iteration the last of a decoding member; returns by how many it ends early."""
        last = self.last_iteration[sequence]
        self._forget_due(sequence, last)
        self.last_iteration[sequence] = iteration
        self.due.setdefault(iteration, []).append(sequence)
        return last - iteration

    def leave(self, sequence: Sequence, context: int) -> int:
        """Take a decoding member out before it is done; returns how many decodes it has left."""
        del self.decoding[sequence]
        last = self.last_iteration.pop(sequence)
        self._forget_due(sequence, last)
        self.num_decodes -= 1
        self.context -= context
        self.forget_context(context)
        return last - self.iteration + 1

    def forget_context(self, context: int) -> None:
        """Take one decoding member with ``context`` tokens out of the order."""
        del self.offsets[bisect_left(self.offsets, context - self.iteration)]

    def _forget_due(self, sequence: Sequence, last: int) -> None:
        bucket = self.due[last]
        bucket.remove(sequence)
        if not bucket:
            del self.due[last]
