"""vLLM v1's scheduler, with the names it gives its settings.

Source: vLLM 0.32.0 and 0.33.0, ``vllm/v1/core/sched/scheduler.py`` and ``async_scheduler.py``. Its
decisions are reproduced call by call (``sarathi-sim lab lockstep``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from sarathi_sim.policies.policy import Chunking, Longest, named
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Sequence, check_at_least_1, release_of


def _by_priority(sequence: Sequence) -> Any:
    """Smaller priorities first, then earlier arrivals, then ids, which vLLM compares as text."""
    return sequence.priority, sequence.arrival_s, str(sequence.id)


@named("vllm")
class Vllm(PoolPolicy):
    """Running requests first, in the order of admission, then waiting ones, under a token budget.

    A decode takes one token of ``max_num_batched_tokens``, a prompt as many as are left; beside a
    draft model each takes one more. If blocks
    run out, the request admitted last is preempted (under ``scheduling_policy: priority`` the one
    with the lowest priority). It computes its tokens again later. ``watermark`` is the share of
    the blocks that an admission leaves free. ``scheduler_reserve_full_isl`` admits a request only
    if its whole prompt fits. ``async_scheduling`` forms an iteration before the tokens of the last
    one are known; under pipeline parallelism this is Model Runner V2. ``version`` is vLLM's
    (``data/engines/vllm.yaml`` says what depends on it): under ``priority``, from 0.33 on the
    requests behind one that preempted itself are still served.
    """

    speculates = True
    looks_ahead = True  # its drafter needs KV beyond the tokens computed
    needs: ClassVar = {
        "adaptive_threshold": "long_prefill_token_threshold",
        "scheduling_policy": "priorities",
    }
    load_kv_async = True
    """Whether KV that is computed elsewhere takes time to arrive. Else it is there at once."""

    def __init__(
        self,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        long_prefill_token_threshold: int | None = None,
        adaptive_threshold: bool = False,
        enable_chunked_prefill: bool = True,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
        async_scheduling: bool = True,
        version: str = "0.33",
    ) -> None:
        check_at_least_1(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must lie between 0 and 1, not {watermark}")
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunking = Chunking(max_num_batched_tokens, max_num_batched_tokens)
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold or 0
        self.adaptive_threshold = adaptive_threshold
        self.enable_chunked_prefill = enable_chunked_prefill
        self.scheduling_policy = scheduling_policy
        self.watermark = watermark
        self.scheduler_reserve_full_isl = scheduler_reserve_full_isl
        self.ahead = async_scheduling
        self.version = version
        self.ends_with_own_preemption = release_of(version) < (0, 33)
        self.order: Callable[[Sequence], Any] | None = (
            _by_priority if scheduling_policy == "priority" else None
        )

    def refusal(self, longest: Longest) -> tuple[str, str] | None:
        """Prompts that are not cut must fit into the budget, however long they may be."""
        if self.enable_chunked_prefill or self.max_num_batched_tokens >= longest.max_length:
            return None
        needed = f"must be at least {longest.max_length} (cluster.max_length)"
        return "max_num_batched_tokens", f"{needed} without enable_chunked_prefill"

    def plan(self, pool: Pool) -> bool:
        """Running requests, then, if none was preempted, waiting ones."""
        most = self.max_num_batched_tokens
        budget = most - pool.draft_slots
        running, waiting = len(pool.running), len(pool.waiting) + len(pool.loading)
        if self.long_prefill_token_threshold:
            most = self._longest_prefill(running + waiting)
        preempted = False
        decodes = pool.num_decodes
        drafting = pool.drafting  # (looked up once)
        if pool.partials or drafting or decodes > budget or pool.decode_blocks > pool.blocks.free:
            budget, preempted = self._serve_running(pool, most)
        elif decodes:  # the common case: all running requests decode, and there are free blocks
            budget -= pool.decodes_all()
        if preempted:
            return False
        settled = not waiting or running >= self.max_num_seqs
        if not settled and budget > 0:
            settled = self._admit(pool, most, budget)
        return settled and len(pool.running) <= self.max_num_batched_tokens

    def _longest_prefill(self, requests: int) -> int:
        """Most tokens of one prompt in an iteration."""
        threshold, budget = self.long_prefill_token_threshold, self.max_num_batched_tokens
        if requests == 1:
            return budget
        if self.adaptive_threshold:
            threshold = max(threshold, budget // max(requests, 1))
        return threshold

    def _serve_running(self, pool: Pool, most: int) -> tuple[int, bool]:
        """Serve running requests; returns the rest of the budget, and whether one was preempted."""
        slots = pool.draft_slots
        budget, preempted = self.max_num_batched_tokens - slots, False
        decodes = pool.num_decodes
        if not pool.drafting and (
            # Prompts are not cut short, so the only unfinished prompt was admitted last.
            (decodes <= budget and not self.long_prefill_token_threshold and self.order is None)
            or self._order_is_irrelevant(pool, most)
        ):
            while pool.decode_blocks > pool.blocks.free:
                pool.preempt(pool.newest())
                preempted = True
            if pool.num_decodes:
                budget -= pool.decodes_all()
            members = list(pool.partials) if pool.partials else []
        else:
            members = pool.eligible()
        for sequence in members:
            if budget <= 0:
                break
            if sequence not in pool.running or self.elsewhere(sequence):
                continue  # preempted meanwhile
            tokens = min(pool.remaining(sequence), most, budget)
            tokens = min(tokens, pool.max_length - pool.context(sequence) - 1)
            while pool.needs(sequence, tokens) > pool.blocks.free:
                victim = self._victim(pool)
                given = pool.preempt(victim)
                budget += given and given + slots
                preempted = True
                if victim is sequence:
                    break
            else:
                pool.run(sequence, tokens)
                budget -= tokens + slots
                continue
            if self.order is None or self.ends_with_own_preemption:
                break
        return budget, preempted

    def elsewhere(self, sequence: Sequence) -> bool:
        """Whether no part of its prompt may be computed now: never; parts overlap."""
        return False

    def _order_is_irrelevant(self, pool: Pool, most: int) -> bool:
        """Whether every running request gets all its tokens in any order."""
        if pool.blocks.sharing:
            return False  # of blocks with the same content, a look-up finds the first entered
        budget = self.max_num_batched_tokens - pool.num_decodes
        blocks = pool.blocks.free - pool.decode_blocks
        for sequence in pool.partials:
            tokens = min(sequence.remaining_prompt, most)
            budget -= tokens + pool.draft_slots
            blocks -= pool.needs(sequence, tokens)
        return budget >= 0 and blocks >= 0

    def _victim(self, pool: Pool) -> Sequence:
        if self.order is None:
            return pool.newest()
        return max(pool.running, key=lambda each: (each.priority, each.arrival_s))

    def _admit(self, pool: Pool, most: int, budget: int) -> bool:
        """Admit from the head of the queue; a request that does not fit is not overtaken.

        One whose KV is computed elsewhere gets blocks for it, as far as prompts under way and other
        such requests leave some, and is admitted when its KV is there. Returns whether the other
        requests have to wait until one ends.
        """
        blocks = pool.blocks
        reserve = int(self.watermark * blocks.num_blocks)
        given = pool.given  # a decode is padded beside others, but not beside prompts
        padded = pool.draft_length and not any(each in pool.partials for each in given)
        beside = bool(given)
        unfinished = [*pool.partials, *pool.loading] if pool.remote else []
        drafts = 1 + pool.draft_length + pool.lookahead if pool.draft_length else 0
        for sequence in self.in_turn(pool):
            if len(pool.running) >= self.max_num_seqs:
                return True
            if budget <= 0:
                return False
            hits = () if sequence.arrived else blocks.lookup(sequence)
            # A drafter that reads hidden states needs those before the next token computed.
            if pool.lookahead and not pool.draft_slots:
                hits = hits[:-1]
            done = len(hits) * blocks.block_size
            loads = False
            if sequence.remote > done and sequence.order < 0:
                if sequence.arrived:
                    blocks.enter(sequence, sequence.remote)
                loads = self.load_kv_async and not sequence.arrived
                done = sequence.remote if loads else min(sequence.remote, sequence.target - 1)
            tokens = 0 if loads else sequence.target - done
            if (
                padded
                and tokens == 1
                and (beside or done)
                and done + 2 + pool.draft_length <= pool.max_length
            ):
                tokens += pool.draft_length
                if tokens > budget:
                    return False
            if tokens > most:
                tokens = most
            if tokens > budget:
                if not self.enable_chunked_prefill:
                    return False
                tokens = budget
            free = blocks.free - (reserve if pool.running else 0)
            whole = done if loads else pool.until(done + tokens)
            if self.scheduler_reserve_full_isl and sequence.target > whole:
                whole = sequence.target
            if blocks.need(sequence, whole, hits) > free:
                return self.scheduler_reserve_full_isl
            if loads:
                promised = blocks.blocks(drafts)
                promised += sum(blocks.need(each, each.target + drafts) for each in unfinished)
                if blocks.need(sequence, done, hits) > free - promised:
                    return self.scheduler_reserve_full_isl
                pool.reserve(sequence, hits)
                unfinished.append(sequence)
                continue
            pool.admit(sequence, tokens, hits)
            if pool.remote and done + tokens < sequence.target:
                unfinished.append(sequence)
            budget -= tokens + pool.draft_slots
        return True

    def in_turn(self, pool: Pool) -> Iterator[Sequence]:
        """The waiting requests in order, while they are admitted and so leave the queue. Those
        whose KV arrived from elsewhere go first. A preempted request is passed over while it has
        tokens in flight from before."""
        if pool.loading:
            yield from [sequence for sequence in pool.loading if sequence.arrived]
        waiting, passed = pool.waiting, 0
        while passed < len(waiting):
            sequence = waiting[passed]
            if sequence.stale:
                passed += 1
            else:
                yield sequence
