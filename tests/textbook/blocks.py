"""A paged KV cache as a textbook would write it: every block is an object, in a table or free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from sarathi_sim.policies.request import Sequence


@dataclass(eq=False, slots=True)
class TextbookBlock:
    """One block: who holds it, and what it is known to hold (None: unknown)."""

    holders: list[Sequence] = field(default_factory=list)
    content: Hashable = None


class TextbookBlocks:
    """A paged KV cache, block by block: each sequence's table, and the queue of free blocks."""

    sharing = True
    """Whoever runs is served in the order of admission, whether others look for its tokens or not
    (:attr:`sarathi_sim.policies.kv.Blocks.sharing`)."""

    def __init__(
        self, num_blocks: int, block_size: int, caching: bool, state_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.capacity = num_blocks - 1
        self.queue = OrderedDict((TextbookBlock(), None) for _ in range(self.capacity))
        self.tables: dict[Sequence, list[TextbookBlock]] = {}
        # Whoever has a table has as many more blocks, for states of recurrent layers.
        self.state_blocks = state_blocks
        self.states: dict[Sequence, list[TextbookBlock]] = {}
        self.entered: dict[Sequence, int] = {}
        # By content, all blocks that hold it, the one that was entered first in front.
        self.known: dict[Hashable, list[TextbookBlock]] = {}

    @property
    def free(self) -> int:
        return len(self.queue)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> tuple[TextbookBlock, ...]:
        hits: list[TextbookBlock] = []
        while self.caching and (len(hits) + 1) * self.block_size < sequence.target:
            copies = self.known.get(sequence.content(len(hits), self.block_size))
            if not copies:
                break
            hits.append(copies[0])
        return tuple(hits)

    def need(self, sequence: Sequence, tokens: int, hits: tuple[TextbookBlock, ...] = ()) -> int:
        held = len(self.tables.get(sequence, ())) + len(hits)
        states = self.state_blocks * (tokens > 0 and not self.states.get(sequence))
        return max(self.blocks(tokens) - held, 0) + sum(not hit.holders for hit in hits) + states

    def take(self, sequence: Sequence, tokens: int, hits: tuple[TextbookBlock, ...] = ()) -> None:
        table = self.tables.setdefault(sequence, [])
        for hit in hits:
            if not hit.holders:
                del self.queue[hit]
            hit.holders.append(sequence)
            table.append(hit)
        if hits:
            self.entered[sequence] = len(hits)
        states = self.states.setdefault(sequence, [])
        while tokens and len(states) < self.state_blocks:
            states.append(self._new(sequence))
        while len(table) < self.blocks(tokens):
            table.append(self._new(sequence))

    def _new(self, sequence: Sequence) -> TextbookBlock:
        block, _ = self.queue.popitem(last=False)
        if block.content is not None:
            copies = self.known[block.content]
            copies.remove(block)
            if not copies:
                del self.known[block.content]
            block.content = None
        block.holders.append(sequence)
        return block

    def enter(self, sequence: Sequence, tokens: int) -> None:
        """Note what the full blocks of the sequence's first ``tokens`` tokens hold."""
        if not self.caching:
            return
        for index in range(self.entered.get(sequence, 0), tokens // self.block_size):
            block = self.tables[sequence][index]
            block.content = sequence.content(index, self.block_size)
            self.known.setdefault(block.content, []).append(block)
            self.entered[sequence] = index + 1

    @property
    def blank(self) -> int:
        return self.free

    def reserve(self, blocks: int) -> None:
        """See to it that so many blocks are blank, as far as possible."""

    def touch(self, sequence: Sequence) -> int:
        """Use what is cached of the sequence; returns how many tokens that is."""
        return len(self.lookup(sequence)) * self.block_size

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """Note that the sequence's first ``tokens`` tokens have been computed."""

    def release(self, sequence: Sequence) -> None:
        for block in reversed(self.tables.pop(sequence) + self.states.pop(sequence, [])):
            block.holders.remove(sequence)
            if not block.holders:
                self.queue[block] = None
                self.queue.move_to_end(block, last=block.content is not None)
        self.entered.pop(sequence, None)

    def check(self) -> None:
        """Every block is free, or in the table of whoever holds it (invariant 2)."""
        held: dict[TextbookBlock, list[Sequence]] = {}
        for sequence, table in self.tables.items():
            for block in table + self.states.get(sequence, []):
                held.setdefault(block, []).append(sequence)
        assert not held.keys() & self.queue.keys()
        assert len(held) + len(self.queue) == self.capacity
        assert not any(block.holders for block in self.queue)
        for block, holders in held.items():
            # Most blocks have one holder.
            if len(holders) > 1 or holders != block.holders:
                assert len(set(holders)) == len(holders)
                assert set(holders) == set(block.holders)
        for content, copies in self.known.items():
            for block in copies:
                assert block.content == content
