"""The blocks of an engine's KV cache: the table of each sequence, and their content. No torch.

A :class:`~sarathi_sim.policies.pool.Pool` uses them like the simulator's blocks, which are mostly
only counted and named after the workload. Here every block has a number. A full block is found by
its tokens and all tokens before it, as in vLLM. Both must have the same hits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from sarathi_sim.policies.kv import Block, Blocks
from sarathi_sim.policies.radix import Node, RadixBlocks, path
from sarathi_sim.policies.request import Sequence
from sarathi_sim.profiler.engine.spec import EngineError, Table


@dataclass(eq=False, slots=True)
class NumberedBlock(Block):
    """A block, and its position in the cache."""

    number: int = 0


class BlockTables(Blocks):
    """A table of blocks for each sequence, and the queue of the free ones.

    ``tokens`` returns the known tokens of a sequence; without it there is no prefix caching.
    ``on_new`` is called with the number of every block that a sequence gets to write to.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tokens: Callable[[Sequence], list[int]] | None = None,
        on_new: Callable[[int], object] = lambda number: None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self._tokens, self._on_new = tokens, on_new
        self.caching = tokens is not None
        self._queue = OrderedDict((NumberedBlock(number=n), None) for n in range(self.capacity))
        self._tables: dict[Sequence, list[NumberedBlock]] = {}
        # By the digest of all tokens up to its end, the blocks that hold them, the first in front.
        self._known: dict[bytes, dict[NumberedBlock, None]] = {}
        self._digests: dict[Sequence, list[bytes]] = {}
        self._entered: dict[Sequence, int] = {}
        self.sharing: set[Sequence] = set()  # as in sarathi_sim.policies.kv.CachedBlocks

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether a sequence has blocks."""
        return sequence in self._tables

    def table(self, sequence: Sequence, tokens: int) -> Table:
        """The numbers of the blocks of a sequence's first ``tokens`` tokens."""
        return tuple(block.number for block in self._tables[sequence])

    def lookup(self, sequence: Sequence) -> tuple[NumberedBlock, ...]:
        """The cached blocks with which the sequence begins, its last token left out."""
        hits: list[NumberedBlock] = []
        if self._tokens is None:
            return ()
        for index in range((sequence.target - 1) // self.block_size):
            copies = self._known.get(self._digest(sequence, index))
            if not copies:
                break
            hits.append(next(iter(copies)))
        return tuple(hits)

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """The digest of the tokens up to the end of block ``index``."""
        assert self._tokens is not None
        digests = self._digests.setdefault(sequence, [])
        while len(digests) <= index:
            first = len(digests) * self.block_size
            tokens = self._tokens(sequence)[first : first + self.block_size]
            if len(tokens) < self.block_size:
                raise EngineError(f"{sequence} enters tokens that are not known yet")
            before = digests[-1] if digests else b""
            digests.append(sha256(before + np.array(tokens, np.int64).tobytes()).digest())
        return digests[index]

    def need(self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = ()) -> int:
        """Free blocks needed: new ones, and hits that no sequence holds."""
        held = len(self._tables.get(sequence, ())) + len(hits)
        return max(self.blocks(tokens) - held, 0) + sum(not hit.holders for hit in hits)

    def take(
        self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = (), known: int = 0
    ) -> None:
        """Give the sequence the hits, and new blocks up to ``tokens`` tokens."""
        table = self._tables.setdefault(sequence, [])
        if self._tokens is not None and sequence.shared_tokens > sequence.prompt_tokens:
            self.sharing.add(sequence)
        for hit in hits:
            assert isinstance(hit, NumberedBlock)
            if not hit.holders:
                del self._queue[hit]
            hit.holders += 1
            table.append(hit)
        if hits:
            self._entered[sequence] = len(hits)
        sequence.held = max(tokens, sequence.held)
        while len(table) < self.blocks(sequence.held):
            table.append(self._new())
        self.free = len(self._queue)
        self.enter(sequence, known)

    def grow(self, sequences: Collection[Sequence]) -> None:
        """Give each of these decoding sequences, whose blocks are full, one more."""
        for sequence in sequences:
            self._tables[sequence].append(self._new())
        self.free = len(self._queue)

    def _new(self) -> NumberedBlock:
        """The first free block; its content is forgotten."""
        if not self._queue:
            raise EngineError(f"all {self.capacity} KV blocks are taken")
        block, _ = self._queue.popitem(last=False)
        if block.content is not None:
            assert isinstance(block.content, bytes)
            copies = self._known[block.content]
            del copies[block]
            if not copies:
                del self._known[block.content]
            block.content = None
        block.holders = 1
        self._on_new(block.number)
        return block

    def enter(self, sequence: Sequence, tokens: int) -> None:
        """Note the content of the full blocks of the sequence's first ``tokens`` tokens."""
        if self._tokens is None:
            return
        for index in range(self._entered.get(sequence, 0), tokens // self.block_size):
            block = self._tables[sequence][index]
            content = self._digest(sequence, index)
            block.content = content
            self._known.setdefault(content, {})[block] = None
            self._entered[sequence] = index + 1

    def release(self, sequence: Sequence, tokens: int, known: int, again: bool) -> None:
        """Take back a sequence's blocks, the last first; known content stays until evicted.

        Raises EngineError if its table does not have the blocks of ``tokens`` tokens.
        """
        self.enter(sequence, known)
        table = self._tables.pop(sequence)
        if len(table) != self.blocks(tokens):
            raise EngineError(f"{sequence} has {len(table)} KV blocks for {tokens} tokens")
        self._entered.pop(sequence, None)
        self.sharing.discard(sequence)
        if not again:
            self._digests.pop(sequence, None)
        sequence.held = 0
        for block in reversed(table):
            block.holders -= 1
            if not block.holders:
                self._queue[block] = None
                self._queue.move_to_end(block, last=block.content is not None)
        self.free = len(self._queue)


class RadixTables(RadixBlocks):
    """A radix tree of numbered pages, and the table of each sequence, for SGLang's policy.

    A page gets its number when its sequence is executed: by then the policy has made room.
    ``on_new`` is told it.
    """

    def __init__(self, num_blocks: int, block_size: int, on_new: Callable[[int], object]) -> None:
        super().__init__(num_blocks, block_size)
        self._on_new = on_new
        self._queue = deque(range(self.capacity))
        self._tables: dict[Sequence, list[int]] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether a sequence has pages."""
        return sequence in self._ends

    def table(self, sequence: Sequence, tokens: int) -> Table:
        """The numbers of the pages of a sequence's first ``tokens`` tokens."""
        if sequence not in self._tables:
            self._tables[sequence] = self._tree(sequence)
        table = self._tables[sequence]
        while len(table) < self.blocks(tokens):
            if not self._queue:
                raise EngineError(f"all {self.capacity} KV blocks are taken")
            table.append(self._queue.popleft())
            self._on_new(table[-1])
        return tuple(table)

    def _enter(self, sequence: Sequence, tokens: int) -> None:
        super()._enter(sequence, tokens)
        table, tree = self._tables[sequence], self._tree(sequence)
        self._queue.extend(own for own, cached in zip(table, tree, strict=False) if own != cached)
        table[: len(tree)] = tree

    def _give_back(self, sequence: Sequence, pages: int) -> None:
        table = self._tables.pop(sequence)
        if len(table) != pages:
            raise EngineError(f"{sequence} has {len(table)} KV blocks, not {pages}")
        self._queue.extend(table[self._ends[sequence].end :])
        super()._give_back(sequence, pages)

    def _tree(self, sequence: Sequence) -> list[int]:
        """The numbers of a running sequence's pages in the tree."""
        nodes = reversed(path(self._ends[sequence]))
        return [number for node in nodes for number in node.numbers]

    def _grown(self, parent: Node, sequence: Sequence, pages: int) -> Node:
        node = super()._grown(parent, sequence, pages)
        node.numbers = self._tables[sequence][node.start : node.end]
        return node

    def _evict(self, node: Node, parent: Node) -> None:
        super()._evict(node, parent)
        self._queue.extend(node.numbers)
