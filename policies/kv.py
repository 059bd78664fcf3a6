"""The paged KV cache: how many blocks are free, and with prefix caching what they hold.

A sequence with KV for C tokens holds ``ceil(C / block_size)`` blocks. Without prefix caching that
is all there is to know, and :class:`Blocks` is a number. :class:`CachedBlocks` keeps every block,
as it must know which ones hold what.

Source: vLLM 0.32, ``vllm/v1/core/block_pool.py`` and ``kv_cache_manager.py``: one block (the null
block) is never given away; free blocks are handed out from the head of a queue; a block that is
freed goes to the tail if its content is known (least recently used first out), else to the head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from policies.request import Sequence


class Blocks:
    """A paged KV cache of ``num_blocks`` blocks of ``block_size`` tokens, without prefix caching.

    One block is the null block, so ``num_blocks - 1`` can be used. ``free`` of them are free.
    """

    caching = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"num_blocks must be at least 2 and block_size at least 1, "
                f"not {num_blocks} and {block_size}"
            )
        self.block_size = block_size
        self.capacity = num_blocks - 1
        self.num_blocks = num_blocks
        self.free = self.capacity

    def blocks(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> tuple[Block, ...]:
        """The cached blocks with which the sequence begins: none here."""
        return ()

    def need(self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = ()) -> int:
        """Free blocks it takes for the sequence to hold ``tokens`` tokens."""
        return self.blocks(tokens) - self.blocks(sequence.prefilled)

    def take(self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = ()) -> None:
        """Give the sequence, which holds ``sequence.prefilled`` tokens, blocks for ``tokens``."""
        self.free -= self.blocks(tokens) - self.blocks(sequence.prefilled)

    def grow(self, sequences: Iterable[Sequence], count: int) -> None:
        """Give each of ``count`` decoding sequences one more block."""
        self.free -= count

    def enter(self, sequence: Sequence, tokens: int) -> None:
        """Note that the sequence's first ``tokens`` tokens are known: nothing to do here."""

    def release(self, sequence: Sequence, tokens: int) -> None:
        """Take back the blocks of a sequence that holds ``tokens`` tokens."""
        self.free += self.blocks(tokens)


@dataclass(eq=False, slots=True)
class Block:
    """One block: how many sequences hold it, and what it is known to hold (None: unknown)."""

    holders: int = 0
    content: Hashable = None


class CachedBlocks(Blocks):
    """A paged KV cache whose full blocks are found again by their content (prefix caching).

    The content of a sequence's i-th block is named by :meth:`~policies.request.Sequence.content`.
    Of several blocks with the same content the one entered first is found.
    """

    caching = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._held: dict[Sequence, list[Block]] = {}
        self._entered: dict[Sequence, int] = {}
        self._known: dict[Hashable, dict[Block, None]] = {}
        # Free blocks: those of unknown content, which are used first, then in order of their use.
        self._blank: list[Block] = [Block() for _ in range(num_blocks - 1)]
        self._used: OrderedDict[Block, None] = OrderedDict()
        super().__init__(num_blocks, block_size)

    def lookup(self, sequence: Sequence) -> tuple[Block, ...]:
        """The cached blocks with which the sequence begins.

        At most those of all its tokens but the last, which must be computed to yield the next one.
        """
        hits = []
        for index in range((sequence.target - 1) // self.block_size):
            copies = self._known.get(sequence.content(index, self.block_size))
            if not copies:
                break
            hits.append(next(iter(copies)))
        return tuple(hits)

    def need(self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = ()) -> int:
        """Free blocks it takes: new ones, and hits that no sequence holds."""
        held = len(self._held.get(sequence, ())) + len(hits)
        return max(self.blocks(tokens) - held, 0) + sum(not hit.holders for hit in hits)

    def take(self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = ()) -> None:
        """Give the sequence the hits, and new blocks up to ``tokens`` tokens."""
        held = self._held.setdefault(sequence, [])
        for hit in hits:
            if not hit.holders:
                del self._used[hit]
                self.free -= 1
            hit.holders += 1
            held.append(hit)
        if hits:
            self._entered[sequence] = len(hits)
        for _ in range(self.blocks(tokens) - len(held)):
            held.append(self._new())

    def _new(self) -> Block:
        self.free -= 1
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._used.popitem(last=False)
            copies = self._known[block.content]
            del copies[block]
            if not copies:
                del self._known[block.content]
            block.content = None
        block.holders = 1
        return block

    def grow(self, sequences: Iterable[Sequence], count: int) -> None:
        """Give each of the sequences one more block."""
        for sequence in sequences:
            self._held[sequence].append(self._new())

    def enter(self, sequence: Sequence, tokens: int) -> None:
        """Enter the full blocks among the sequence's first ``tokens`` tokens into the cache."""
        first, last = self._entered.get(sequence, 0), tokens // self.block_size
        if last <= first:
            return
        held = self._held[sequence]
        for index in range(first, last):
            block = held[index]
            block.content = sequence.content(index, self.block_size)
            self._known.setdefault(block.content, {})[block] = None
        self._entered[sequence] = last

    def release(self, sequence: Sequence, tokens: int) -> None:
        """Take back a sequence's blocks, the last first; what is known stays until it is used."""
        for block in reversed(self._held.pop(sequence, [])):
            block.holders -= 1
            if not block.holders:
                self.free += 1
                if block.content is None:
                    self._blank.append(block)
                else:
                    self._used[block] = None
        self._entered.pop(sequence, None)
