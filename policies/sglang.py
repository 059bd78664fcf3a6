"""SGLang's scheduler, with the names it gives its settings.

Source: SGLang 0.5.23, ``sglang/srt/managers/scheduler.py`` (``get_next_batch_to_run``),
``schedule_policy.py`` (``PrefillAdder``), ``schedule_batch.py`` (``retract_decode``) and
``scheduler_components/new_token_ratio_tracker.py``. Not compared with recorded decisions:
docs/engines.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from sarathi_sim.policies.policy import Chunking, named
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Sequence, check_at_least_1

CLIP_MAX_NEW_TOKENS = 4096
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20
LPM_MOST_WAITING = 128
"""With more waiting requests, longest prefix match becomes first come, first served."""

SchedulePolicy = Literal["fcfs", "lpm", "lof"]


@named("sglang")
class Sglang:
    """Prompts before decodes: decodes wait while a prompt can be served (or join it, if mixed).

    A prefill batch takes prompts up to ``max_prefill_tokens`` and ``chunked_prefill_size`` tokens,
    each prompt counted in whole pages. The prompt that does not fit is cut, and continues first in
    the next batch. A request is admitted if the free memory holds its whole length and the expected
    growth of the running requests: ``new_token_ratio`` of all that they may generate. This ratio
    starts at 0.7 x ``schedule_conservativeness`` and falls with every decode. If it was too low,
    the requests that have generated least are retracted. ``enable_mixed_chunk`` lets the decodes
    join a prefill batch. A page is a block of the KV cache. While requests decode, new ones are
    looked for every ``scheduler_recv_interval`` iterations only; after a prefill batch at once.
    """

    pooled = True
    memory_share = "mem_fraction_static"
    order: Callable[[Sequence], Any] | None = None

    def __init__(
        self,
        chunked_prefill_size: int | None = 8192,
        max_prefill_tokens: int = 16384,
        max_running_requests: int = 256,
        schedule_conservativeness: float = 1.0,
        schedule_policy: SchedulePolicy = "fcfs",
        enable_mixed_chunk: bool = False,
        disable_overlap_schedule: bool = False,
        scheduler_recv_interval: int = 1,
    ) -> None:
        if chunked_prefill_size is not None and chunked_prefill_size < 1:
            problem = f"must be at least 1 or left empty, not {chunked_prefill_size}"
            raise ValueError(f"chunked_prefill_size {problem}")
        check_at_least_1(
            max_prefill_tokens=max_prefill_tokens,
            max_running_requests=max_running_requests,
            scheduler_recv_interval=scheduler_recv_interval,
        )
        self.chunked_prefill_size = chunked_prefill_size
        self.max_prefill_tokens = max_prefill_tokens
        self.max_num_seqs = max_running_requests
        self.schedule_conservativeness = schedule_conservativeness
        self.schedule_policy = schedule_policy
        self.enable_mixed_chunk = enable_mixed_chunk
        self.ahead = not disable_overlap_schedule
        self.scheduler_recv_interval = scheduler_recv_interval
        self.initial_ratio = min(INIT_NEW_TOKEN_RATIO * schedule_conservativeness, 1.0)
        self.least_ratio = self.initial_ratio * MIN_NEW_TOKEN_RATIO_FACTOR
        self.decay = (self.initial_ratio - self.least_ratio) / NEW_TOKEN_RATIO_DECAY_STEPS
        # Without chunks the first prompt may be of any length.
        self.chunking: Chunking | None = None
        if chunked_prefill_size is not None:
            most = max(chunked_prefill_size, max_running_requests)
            self.chunking = Chunking(most, most)

    def plan(self, pool: Pool) -> None:
        """A prefill batch if there can be one, else the decodes."""
        state = pool.state
        if state.get("emptied") != pool.emptied:
            state.update(emptied=pool.emptied, ratio=self.initial_ratio, full=False, running=0)
        if len(pool.running) < state["running"] or pool.partials:
            state["full"] = False  # somebody left, or is cut and goes on
        if len(pool.running) == len(pool.partials):
            state["full"] = False
        self._receive(pool)
        state["prefilled"] = self._prefill(pool)
        if state["prefilled"]:
            fits = pool.decode_blocks <= pool.blocks.free
            if self.enable_mixed_chunk and pool.num_decodes and fits:
                pool.decodes_all()
        elif pool.num_decodes:
            self._decode(pool)
        state["running"] = len(pool.running)

    def _receive(self, pool: Pool) -> None:
        """Look for new requests if it is time; ``state["received"]`` are those who wait and are
        known."""
        if self.scheduler_recv_interval == 1:
            return
        state = pool.state
        known: set[int] = state.setdefault("received", set())
        decodes = state.get("unseen", 0) + 1
        if not pool.running or state.get("prefilled") or decodes >= self.scheduler_recv_interval:
            known.update(each.id for each in pool.waiting)
            decodes = 0
        state["unseen"] = decodes

    # Prefill -------------------------------------------------------------------------------------

    def _prefill(self, pool: Pool) -> bool:
        """Form a prefill batch; returns whether there is one."""
        state = pool.state
        if not pool.partials and (state["full"] or not pool.waiting):
            return False
        budget = _Budget(self, pool)
        formed = self._go_on(pool, budget)
        for sequence in self._in_order(pool):
            if budget.spent:
                break
            if len(pool.running) >= self.max_num_seqs:
                state["full"] = True
            if state["full"]:
                break
            if sequence.stale:
                continue  # its tokens from before it was retracted are still to come
            if not self._add(pool, budget, sequence):
                break
            formed = True
        return formed

    def _go_on(self, pool: Pool, budget: _Budget) -> bool:
        """Continue a cut prompt; returns whether there was one."""
        formed = False
        for sequence in list(pool.partials):
            rest = sequence.remaining_prompt
            tokens = min(rest, int(budget.chunk))
            if 0 < int(budget.memory) < tokens:
                tokens = int(budget.memory)
            # (The engine takes it for granted that there are free pages.)
            pages = pool.blocks.blocks(sequence.prefilled) + pool.blocks.free
            tokens = min(tokens, pages * budget.page - sequence.prefilled)
            if tokens > 0:
                pool.run(sequence, tokens)
                budget.charge(tokens, 0 if tokens < rest else sequence.max_tokens)
                formed = True
        return formed

    def _in_order(self, pool: Pool) -> list[Sequence]:
        """Those who wait, in the order in which they are looked at."""
        queue = list(pool.waiting)
        if (known := pool.state.get("received")) is not None:
            queue = [each for each in queue if each.id in known]
        if self.schedule_policy == "lpm" and len(queue) <= LPM_MOST_WAITING:
            queue.sort(key=lambda each: -len(pool.blocks.lookup(each)))
        elif self.schedule_policy == "lof":
            queue.sort(key=lambda each: -each.max_tokens)
        return queue

    def _add(self, pool: Pool, budget: _Budget, sequence: Sequence) -> bool:
        """Admit a sequence, cut if need be; returns whether the next one may be looked at."""
        blocks = pool.blocks
        page = blocks.block_size
        hits = blocks.lookup(sequence)
        rest = sequence.target - len(hits) * page
        locked = blocks.need(sequence, sequence.target, hits) - blocks.blocks(rest)
        generated = sequence.target - sequence.prompt_tokens
        expected = min(max(sequence.max_tokens - generated, 0), CLIP_MAX_NEW_TOKENS)
        if pool.running and rest + expected + page >= budget.memory - locked * page:
            pool.state["full"] = bool(pool.running)
            return False
        whole = blocks.blocks(rest) * page
        if self.chunked_prefill_size is None and budget.charged and whole >= budget.input:
            return False
        tokens = rest
        if whole > budget.chunk:
            tokens = int(budget.chunk) // page * page
            if tokens <= 0:
                return False
        budget.memory -= locked * page
        pool.admit(sequence, tokens, hits)
        budget.charge(tokens, 0 if tokens < rest else sequence.max_tokens)
        if budget.memory <= 0:
            pool.state["full"] = True
            return False
        return True

    # Decode --------------------------------------------------------------------------------------

    def _decode(self, pool: Pool) -> None:
        state = pool.state
        if pool.decode_blocks <= pool.blocks.free:
            state["ratio"] = max(state["ratio"] - self.decay, self.least_ratio)
        else:
            self._retract(pool)
        if pool.num_decodes:
            pool.decodes_all()

    def _retract(self, pool: Pool) -> None:
        """Retract who has generated least, of those the longest prompt, until the rest fits."""
        decoding = [each for each in pool.eligible() if each not in pool.partials]
        decoding.sort(key=lambda each: (-_generated(pool, each), each.prompt_tokens))
        while decoding and pool.decode_blocks > pool.blocks.free:
            pool.preempt(decoding.pop(), last=True)
        total = sum(_generated(pool, each) for each in decoding)
        most = sum(each.max_tokens for each in decoding)
        estimate = (total + RETRACT_DECODE_STEPS * len(decoding)) / (most + 1)
        ratio = min(1.0, estimate) if decoding else self.initial_ratio
        pool.state.update(ratio=ratio, full=False)


class _Budget:
    """What is left for a prefill batch: ``input`` and ``chunk`` tokens, and the ``memory`` that
    nobody is expected to take, in tokens."""

    def __init__(self, policy: Sglang, pool: Pool) -> None:
        blocks = pool.blocks
        self.page = blocks.block_size
        ratio = pool.state["ratio"]
        decoding = [each for each in pool.running if each not in pool.partials]
        mixed = len(decoding) if policy.enable_mixed_chunk else 0
        self.input: float = policy.max_prefill_tokens - mixed
        size = policy.chunked_prefill_size
        self.chunk: float = float("inf") if size is None else size - mixed
        self.memory = (
            blocks.free * self.page
            - mixed
            - sum(
                min(each.max_tokens - _generated(pool, each), CLIP_MAX_NEW_TOKENS) * ratio
                for each in decoding
            )
        )
        self.charged = False

    @property
    def spent(self) -> bool:
        """Whether no prompt can be added for want of tokens (of memory, the next one finds out)."""
        return self.memory > 0 and (self.input <= 0 or self.chunk <= 0)

    def charge(self, tokens: int, max_tokens: int) -> None:
        """Count a prompt's tokens, in whole pages, and what it may generate."""
        pages = -(-tokens // self.page) * self.page
        self.input -= pages
        self.chunk -= pages
        self.memory -= pages + self.page + min(max_tokens, CLIP_MAX_NEW_TOKENS)
        self.charged = True


def _generated(pool: Pool, sequence: Sequence) -> int:
    """Tokens that a sequence past its prompt has generated, the one on its way included."""
    return pool.held(sequence) + 1 - sequence.prompt_tokens
