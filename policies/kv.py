"""The KV cache: paged, with prefix caching or without, or reserved.

A sequence with KV for C tokens holds ``ceil(C / block_size)`` blocks. Without prefix caching the
blocks are only counted (:class:`Blocks`). :class:`CachedBlocks` keeps blocks one by one, because it
must know their content.

Source: vLLM 0.32, ``vllm/v1/core/block_pool.py`` and ``kv_cache_manager.py``: one block (the null
block) is never used; free blocks are taken from the head of a queue; a freed block goes to the tail
if its content is known (LRU eviction), else to the head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from .request import Request, Sequence, check_at_least_1


class Blocks:
    """A paged KV cache of ``num_blocks`` blocks of ``block_size`` tokens, without prefix caching.

    One block is the null block, so ``num_blocks - 1`` can be used. ``free`` of them are free. A
    sequence holds ``state_blocks`` more, for the states of recurrent layers.
    """

    sharing: Collection[Sequence] = ()
    """Sequences whose generated tokens other sequences may look up, in the order of admission."""
    caching = False
    """Whether there is prefix caching."""
    late = False
    """Whether a block is in the prefix cache only once it is computed (:meth:`computed`)."""

    def __init__(self, num_blocks: int, block_size: int, state_blocks: int = 0) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"num_blocks must be at least 2 and block_size at least 1, "
                f"not {num_blocks} and {block_size}"
            )
        self.block_size = block_size
        self.capacity = num_blocks - 1
        self.num_blocks = num_blocks
        self.free = self.capacity
        self.state_blocks = state_blocks

    def blocks(self, tokens: int) -> int:
        """The number of blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def refusal(self, request: Request) -> str | None:
        """The reason why a request would never fit, or None."""
        # The last token it yields is never written.
        needed = self.state_blocks + self.blocks(request.prompt_tokens + request.max_tokens - 1)
        if needed <= self.capacity:
            return None
        return f"needs {needed} KV blocks, but the replica holds {self.capacity}"

    def reservation(self, request: Request) -> int:
        """The tokens that admitting a request reserves: none here."""
        return 0

    def lookup(self, sequence: Sequence) -> tuple[Block, ...]:
        """The cached blocks with which the sequence begins: none here."""
        return ()

    def need(self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = ()) -> int:
        """Free blocks that the sequence needs to hold ``tokens`` tokens."""
        held, size = sequence.held, self.block_size
        if tokens <= held:
            return 0
        return -held // size - -tokens // size + (0 if held else self.state_blocks)

    def take(
        self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = (), known: int = 0
    ) -> None:
        """Give the sequence blocks for ``tokens`` tokens; it has them for ``sequence.held``. Its
        first ``known`` tokens are known: see :meth:`enter`."""
        held, size = sequence.held, self.block_size
        if tokens > held:
            self.free -= -held // size - -tokens // size + (0 if held else self.state_blocks)
            sequence.held = tokens

    def grow(self, sequences: Collection[Sequence]) -> None:
        """Give each of these decoding sequences, whose blocks are full, one more."""
        self.free -= len(sequences)

    def enter(self, sequence: Sequence, tokens: int) -> None:
        """Note that the sequence's first ``tokens`` tokens are known: nothing to do here."""

    def preload(self, sequence: Sequence) -> None:
        """Note the full blocks of the sequence's prompt as cached: nothing to do here."""

    @property
    def blank(self) -> int:
        """Free blocks that can be written to at once."""
        return self.free

    def reserve(self, pages: int) -> None:
        """Evict until ``pages`` blocks are blank, if possible; here all free blocks are."""

    def touch(self, sequence: Sequence) -> int:
        """Mark the sequence's cached prefix as used; returns its tokens."""
        return len(self.lookup(sequence)) * self.block_size

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """Note that the sequence's first ``tokens`` tokens have been computed."""

    def release(self, sequence: Sequence, tokens: int, known: int, again: bool) -> None:
        """Take back the blocks of a sequence that holds ``tokens`` tokens. The content of the first
        ``known`` tokens is known. With ``again`` the sequence was preempted, and will look them
        up."""
        self.free -= -tokens // self.block_size - (self.state_blocks if sequence.held else 0)
        sequence.held = 0


class Reserved(Blocks):
    """KV memory that is not paged: an admission reserves the request's largest length.

    This is ``each`` tokens (the paper's pre-allocation), or without it prompt and declared output.
    So every admitted sequence can finish (invariant 2). A block is a single token.
    """

    def __init__(self, capacity: int, each: int | None = None) -> None:
        check_at_least_1(kv_capacity=capacity)
        super().__init__(capacity + 1, 1)
        self._each = each

    def refusal(self, request: Request) -> str | None:
        """The reason why a request would never fit, or None."""
        needed = self.reservation(request)
        if needed <= self.capacity:
            return None
        return f"reserves {needed} KV tokens, but the replica holds {self.capacity}"

    def reservation(self, request: Request) -> int:
        """The tokens that admitting a request reserves."""
        return self._each or request.prompt_tokens + request.max_tokens

    def take(
        self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = (), known: int = 0
    ) -> None:
        """Reserve the sequence's largest length."""
        self.free -= sequence.kv_tokens

    def release(self, sequence: Sequence, tokens: int, known: int, again: bool) -> None:
        """Take back the reservation."""
        self.free += sequence.kv_tokens


@dataclass(eq=False, slots=True)
class Block:
    """One block: the number of sequences that hold it, and its content (None: unknown)."""

    holders: int = 0
    content: Hashable = None


@dataclass(eq=False, slots=True)
class _PlainBlocks:
    """Consecutive free blocks whose content no sequence will look up."""

    count: int


class CachedBlocks(Blocks):
    """A paged KV cache whose full blocks are found again by their content (prefix caching).

    The content of a sequence's i-th block is named by
    :meth:`~sarathi_sim.policies.request.Sequence.content`. Of several blocks with the same content
    the one entered first is found.

    Only blocks that a sequence may look up are kept one by one: those of a shared prefix, and those
    of a preempted sequence, which looks up its own. All others are counted, so growing decodes cost
    no more than without caching.
    """

    caching = True

    def __init__(self, num_blocks: int, block_size: int, state_blocks: int = 0) -> None:
        super().__init__(num_blocks, block_size, state_blocks)
        # The first blocks of each sequence that are kept one by one, and how many were entered.
        self._held: dict[Sequence, list[Block]] = {}
        self._entered: dict[Sequence, int] = {}
        self._known: dict[Hashable, dict[Block, None]] = {}
        # Sequences that share more than their prompts: others look up their generated tokens.
        self.sharing: dict[Sequence, None] = {}  # in the order of admission
        # Free blocks: those of unknown content, which are used first, then in order of their use.
        self._blank = self.capacity
        self._used: OrderedDict[Block | _PlainBlocks, None] = OrderedDict()

    def preload(self, sequence: Sequence) -> None:
        """Note the full blocks of the sequence's prompt as cached, if so many are blank."""
        full = sequence.prompt_tokens // self.block_size
        if full > self._blank:
            return
        self._blank -= full
        for index in reversed(range(full)):
            block = Block()
            self._learn(block, sequence.content(index, self.block_size))
            self._used[block] = None

    def lookup(self, sequence: Sequence) -> tuple[Block, ...]:
        """The cached blocks with which the sequence begins. The last token is never among them: it
        must be computed to yield the next one."""
        if sequence.order < 0 and sequence.shared_tokens < self.block_size:
            return ()  # it never ran, and shares no block
        hits = []
        for index in range((sequence.target - 1) // self.block_size):
            copies = self._known.get(sequence.content(index, self.block_size))
            if not copies:
                break
            hits.append(next(iter(copies)))
        return tuple(hits)

    def need(self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = ()) -> int:
        """Free blocks it takes: new ones, and hits that no sequence holds."""
        if not hits:
            return Blocks.need(self, sequence, tokens)
        found = sum(not hit.holders for hit in hits)
        return max(self.blocks(tokens) - len(hits), 0) + found + self.state_blocks

    def take(
        self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = (), known: int = 0
    ) -> None:
        """Give the sequence the hits, and new blocks up to ``tokens`` tokens."""
        size, before = self.block_size, sequence.held
        states = 0 if before or not tokens else self.state_blocks
        if tokens < before:
            tokens = before
        sequence.held = tokens
        total, before = -(-tokens // size), -(-before // size)
        shared = sequence.shared_tokens // size
        held = self._held.get(sequence)
        if held is None and (shared or hits):
            held = self._held[sequence] = []
            if sequence.shared_tokens > sequence.prompt_tokens:
                self.sharing[sequence] = None
        for hit in hits:
            if not hit.holders:
                del self._used[hit]
                self.free -= 1
            hit.holders += 1
        if hits and held is not None:
            held.extend(hits)
            self._entered[sequence] = before = len(hits)
        new = total - before
        self._use(new + states)
        if held is not None and new and len(held) == before:  # none of its own before them
            held.extend(Block(1) for _ in range(min(total, shared) - before))
        if held is not None:
            self.enter(sequence, known)

    def _use(self, count: int) -> None:
        """Take free blocks, and forget their content."""
        self.free -= count
        self._blank -= count
        if self._blank >= 0:
            return
        count, self._blank = -self._blank, 0
        while count:
            oldest = next(iter(self._used))
            if isinstance(oldest, _PlainBlocks):
                if oldest.count > count:
                    oldest.count -= count
                    return
                count -= oldest.count
            else:
                count -= 1
                copies = self._known[oldest.content]
                del copies[oldest]
                if not copies:
                    del self._known[oldest.content]
            del self._used[oldest]

    def grow(self, sequences: Collection[Sequence]) -> None:
        """Give each of these decoding sequences, whose blocks are full, one more."""
        self._use(len(sequences))
        if self.sharing:
            for sequence in sequences:
                if sequence in self.sharing:
                    held = self._held[sequence]
                    if (len(held) + 1) * self.block_size <= sequence.shared_tokens:
                        held.append(Block(1))

    def enter(self, sequence: Sequence, tokens: int) -> None:
        """Note that the sequence's first ``tokens`` tokens are known, where others may look."""
        held = self._held.get(sequence)
        if held is None:
            return
        first, last = self._entered.get(sequence, 0), min(tokens // self.block_size, len(held))
        for index in range(first, last):
            self._learn(held[index], sequence.content(index, self.block_size))
        if last > first:
            self._entered[sequence] = last

    def _learn(self, block: Block, content: Hashable) -> None:
        block.content = content
        self._known.setdefault(content, {})[block] = None

    def release(self, sequence: Sequence, tokens: int, known: int, again: bool) -> None:
        """Take back a sequence's blocks, the last first; known content stays until evicted."""
        held: list[Block] = []
        if sequence in self._held:
            held = self._held.pop(sequence)
            self._entered.pop(sequence, None)
            self.sharing.pop(sequence, None)
        first = len(held)
        own = self.blocks(tokens) - first + (self.state_blocks if sequence.held else 0)
        sequence.held = 0
        full = max(known // self.block_size - first, 0)
        self.free += own
        self._blank += own - full
        if again:
            for index in reversed(range(first, first + full)):
                block = Block()
                self._learn(block, sequence.content(index, self.block_size))
                self._used[block] = None
        elif full:
            self._used[_PlainBlocks(full)] = None
        for block in reversed(held):
            block.holders -= 1
            if not block.holders:
                self.free += 1
                if block.content is None:
                    self._blank += 1
                else:
                    self._used[block] = None
