"""Sarathi-Serve's scheduler, with the names it gives its settings.

Source: microsoft/sarathi-serve at 96f9911, ``sarathi/core/scheduler/sarathi_scheduler.py``,
``base_scheduler.py`` and ``core/block_space_manager``. Not compared with recorded decisions: see
docs/model/engines.md.
"""

from __future__ import annotations

from typing import ClassVar

from sarathi_sim.policies.policy import Chunking, named
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Sequence, check_at_least_1

WATERMARK = 0.01
"""Share of the blocks that an admission leaves free."""
ALIGNMENT = 32
"""Dynamic chunk sizes are rounded to multiples of this."""


def chunk_schedule(low: int, high: int, stages: int) -> tuple[int, ...]:
    """Chunk sizes from ``high`` down to ``low``, equally spaced, rounded to multiples of 32 (or of
    ``low``, if that is less), halves to the even multiple."""
    if stages == 1:
        spaced = [low]
    else:
        spaced = [low + (high - low) * stage // (stages - 1) for stage in range(stages)]
    unit = min(ALIGNMENT, low)
    return tuple(round(size / unit) * unit for size in reversed(spaced))


@named("sarathi_serve")
class SarathiServe(PoolPolicy):
    """All decodes, then prompts that have begun, then waiting ones, up to ``chunk_size`` tokens.

    The budget never stops a decode. ``enable_dynamic_chunking_schedule`` replaces ``chunk_size`` by
    a size that falls with the processed prompt tokens of a request: from ``high_chunk_size`` to
    ``low_chunk_size`` in ``chunk_schedule_stages`` steps over ``chunk_schedule_max_tokens`` tokens.
    Admission takes blocks for the whole prompt and leaves 1 % of all blocks free. A decode needs a
    free block, even if it fills none. If there is none, the request that arrived last is preempted
    and computes its tokens again. There is no prefix caching.
    """

    version = "0.2"  # of vLLM, from which it was forked
    needs: ClassVar = dict.fromkeys(
        ("low_chunk_size", "high_chunk_size", "chunk_schedule_max_tokens", "chunk_schedule_stages"),
        "enable_dynamic_chunking_schedule",
    )

    def __init__(
        self,
        chunk_size: int = 512,
        max_num_seqs: int = 128,
        enable_dynamic_chunking_schedule: bool = False,
        low_chunk_size: int = 512,
        high_chunk_size: int = 512,
        chunk_schedule_max_tokens: int = 4096,
        chunk_schedule_stages: int = 16,
    ) -> None:
        check_at_least_1(
            chunk_size=chunk_size,
            max_num_seqs=max_num_seqs,
            chunk_schedule_max_tokens=chunk_schedule_max_tokens,
            chunk_schedule_stages=chunk_schedule_stages,
        )
        if enable_dynamic_chunking_schedule:
            for name, value in (
                ("low_chunk_size", low_chunk_size),
                ("high_chunk_size", high_chunk_size),
            ):
                if value < 1 or value % ALIGNMENT:
                    raise ValueError(f"{name} must be a multiple of {ALIGNMENT}, not {value}")
            if high_chunk_size < low_chunk_size:
                raise ValueError("high_chunk_size must be at least low_chunk_size")
        self.chunk_size = chunk_size
        self.max_num_seqs = max_num_seqs
        self.enable_dynamic_chunking_schedule = enable_dynamic_chunking_schedule
        self._sizes: tuple[int, ...] = (chunk_size,)
        self._tokens_per_stage = 0
        if enable_dynamic_chunking_schedule:
            self._sizes = chunk_schedule(low_chunk_size, high_chunk_size, chunk_schedule_stages)
            self._tokens_per_stage = -(-chunk_schedule_max_tokens // chunk_schedule_stages)
        # Decodes alone may exceed the chunk size.
        most = max(*self._sizes, max_num_seqs)
        self.chunking = Chunking(most, most)

    def _size(self, done: int) -> int:
        """The chunk size for a request that has processed ``done`` prompt tokens."""
        if not self._tokens_per_stage:
            return self.chunk_size
        return self._sizes[min(done // self._tokens_per_stage, len(self._sizes) - 1)]

    def plan(self, pool: Pool) -> None:
        """Decodes, running prompts, waiting prompts."""
        partials = sorted((each for each in pool.partials if not each.awaited), key=_arrival)
        tokens = self._serve_decodes(pool)
        for sequence in partials:
            if sequence in pool.running:
                size = self._size(sequence.prefilled)
                chunk = min(sequence.remaining_prompt, size - tokens)
                if chunk > 0:
                    pool.run(sequence, chunk)
                    tokens += chunk
        self._admit(pool, tokens)

    def _serve_decodes(self, pool: Pool) -> int:
        """Schedule decodes, and preempt if blocks run out. Returns the number of decodes."""
        if pool.blocks.free > pool.decode_blocks:  # one block is left, in any order
            return pool.decodes_all() if pool.num_decodes else 0
        queue = sorted(pool.running, key=_arrival)
        eligible = {each for each in pool.eligible() if each not in pool.partials}
        decodes = 0
        while queue:
            sequence = queue.pop(0)
            if sequence not in eligible:
                continue  # in its prompt or in flight; no longer a victim
            while not pool.blocks.free:
                victim = queue.pop() if queue else sequence
                pool.preempt(victim)
                if victim is sequence:
                    break
            else:
                pool.run(sequence, 1)
                decodes += 1
        return decodes

    def _admit(self, pool: Pool, tokens: int) -> None:
        """Admit from the head of the queue; a request that does not fit stops all behind it."""
        blocks = pool.blocks
        reserve = int(WATERMARK * blocks.capacity)
        while pool.waiting and len(pool.running) < self.max_num_seqs:
            head = pool.waiting[0]
            free = blocks.free - (reserve if pool.running else 0)
            if head.stale or blocks.need(head, head.target) > free:
                return
            chunk = min(head.target, self._size(0) - tokens)
            if chunk <= 0:
                return
            pool.admit(head, chunk, hold=head.target)
            tokens += chunk


def _arrival(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrival_s, sequence.id
