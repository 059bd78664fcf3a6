"""TensorRT-LLM's in-flight batching, with the names it gives its settings.

Source: NVIDIA/TensorRT-LLM at 02a10fe, ``cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp``,
``microBatchScheduler.cpp`` (at 0a949d3), and of the PyTorch backend's ``py_executor.py``
``_waiting_requests``, ``_balance_adp_requests`` and ``_pad_attention_dp_dummy_request``. Not
compared with recorded decisions: docs/model/engines.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar, Literal

from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.policy import Chunking, Longest, named
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Sequence, check_at_least_1

CapacitySchedulerPolicy = Literal["guaranteed_no_evict", "max_utilization"]
Context = tuple[Sequence, int]
"""A sequence, and the tokens that it has to process before it decodes."""


def _by_arrival(sequence: Sequence) -> tuple[float, int]:
    """The engine keeps one list of its requests, paused ones included, as they arrived."""
    return sequence.arrival_s, sequence.id


@named("trtllm")
class Trtllm(PoolPolicy):
    """Requests that fit into the memory, then into ``max_num_tokens``: decodes before prompts.

    ``capacity_scheduler_policy: guaranteed_no_evict`` admits a request only if it and all running
    requests can reach all their declared tokens. ``max_utilization`` admits it if its prompt fits;
    if blocks run out, it pauses the started request that arrived last (a short prompt may have
    started before a longer one that arrived earlier), which computes its tokens again.
    ``enable_chunked_prefill`` cuts prompts that do not fit, to whole blocks. Prompts wait while
    decodes run, until both make up ``batch_wait_max_tokens_ratio`` of ``max_num_tokens``, for at
    most ``batch_wait_timeout_iters`` iterations. Without both settings they do not wait.

    With ``enable_balance`` (of ``attention_dp_config``) the ranks of data-parallel attention start
    prompts together. While all of them decode, no rank starts one until all have one, and then
    ``batching_wait_iters`` steps more (none: the engine's 0; its default is 10). At every
    ``timeout_iters``-th step at which not all have one, those that have one start it. Without ranks
    it does nothing.

    A request whose prompt was computed elsewhere takes one of ``max_batch_size`` slots, and blocks
    for its prompt, before its KV is sent. It decodes as soon as that is there. While it is not, the
    engine does not count the blocks that it will take later; here they are counted.
    """

    speculates = True
    memory_share = "free_gpu_memory_fraction"
    needs: ClassVar = {
        "batch_wait_timeout_iters": "batch_wait_max_tokens_ratio",
        "batch_wait_max_tokens_ratio": "batch_wait_timeout_iters",
        "enable_balance": "ranks",
        "timeout_iters": "enable_balance",
        "batching_wait_iters": "enable_balance",
    }

    def __init__(
        self,
        max_num_tokens: int = 8192,
        max_batch_size: int = 2048,
        capacity_scheduler_policy: CapacitySchedulerPolicy = "guaranteed_no_evict",
        enable_chunked_prefill: bool = False,
        batch_wait_timeout_iters: int | None = None,
        batch_wait_max_tokens_ratio: float = 0.0,
        disable_overlap_scheduler: bool = False,
        enable_balance: bool = False,
        timeout_iters: int = 50,
        batching_wait_iters: int | None = None,
    ) -> None:
        check_at_least_1(
            max_num_tokens=max_num_tokens,
            max_batch_size=max_batch_size,
            timeout_iters=timeout_iters,
        )
        if not 0 <= batch_wait_max_tokens_ratio <= 1:
            raise ValueError(
                f"batch_wait_max_tokens_ratio must lie between 0 and 1, "
                f"not {batch_wait_max_tokens_ratio}"
            )
        self.order: Callable[[Sequence], Any] | None = _by_arrival
        self.max_num_batched_tokens = max_num_tokens
        self.chunking = Chunking(max_num_tokens, max_num_tokens)
        self.max_num_seqs = max_batch_size
        self.capacity_scheduler_policy = capacity_scheduler_policy
        self.enable_chunked_prefill = enable_chunked_prefill
        self.batch_wait_timeout_iters = batch_wait_timeout_iters or 0
        self.batch_wait_max_tokens_ratio = batch_wait_max_tokens_ratio
        self.ahead = not disable_overlap_scheduler
        self.enable_balance = enable_balance
        self.timeout_iters = timeout_iters
        self.batching_wait_iters = batching_wait_iters or 0

    def refusal(self, longest: Longest) -> tuple[str, str] | None:
        """Prompts that are not cut must fit into the budget, and so must a block if they are. No
        prompt is computed where it comes from elsewhere and none is evicted."""
        if longest.remote and self.capacity_scheduler_policy == "guaranteed_no_evict":
            return None
        needed, what = longest.prompt, "the longest prompt, unless enable_chunked_prefill is true"
        if self.enable_chunked_prefill:
            needed = min(longest.prompt, longest.block_size)
            what = "kv_cache.block_size: prompts are cut to whole blocks"
        if self.max_num_batched_tokens >= needed:
            return None
        return "max_num_tokens", f"must be at least {needed}, {what}"

    def plan(self, pool: Pool) -> None:
        """Decodes, then running prompts, then waiting prompts."""
        contexts = pool.state.pop("agreed", None)
        if contexts is None:
            contexts = self._contexts(pool)
        decodes = self._serve_decodes(pool)
        if contexts and not (decodes and self._wait(pool, contexts, decodes)):
            _serve_contexts(pool, contexts)

    def agree(self, pools: list[Pool]) -> None:
        """Let the ranks' prompts of the step that is formed now start, or wait. A rank without
        requests computes a dummy decode, so it counts as one that decodes. As in the engine, steps
        without any prompt count among the ``timeout_iters``, too."""
        if not self.enable_balance:
            return
        busy = [pool for pool in pools if pool.waiting or pool.running or pool.loading]
        for pool in busy:
            pool.look()
            pool.state["agreed"] = self._contexts(pool)
        prompts = [bool(pool.state["agreed"]) for pool in busy]
        decodes = [pool.num_decodes for pool in busy]
        if not any(prompts) and not any(decodes):
            return
        counts = pools[0].state.setdefault("balance", {"lacking": 0, "batching": 0})
        if len(busy) == len(pools) and all(prompts) and max(decodes) < self.max_num_seqs:
            counts["lacking"] = 0
            wait = all(decodes) and counts["batching"] < self.batching_wait_iters
            if all(decodes):
                counts["batching"] = counts["batching"] + 1 if wait else 0
        else:
            counts["lacking"] += 1
            wait = all(decodes) and counts["lacking"] < self.timeout_iters
            if not wait:
                counts["lacking"] = 0
        if wait:
            for pool in busy:
                pool.state["agreed"] = []

    def _contexts(self, pool: Pool) -> list[Context]:
        """The prompts that may run beside all decodes: running ones, then waiting ones."""
        if pool.loading:
            for sequence in [each for each in pool.loading if each.arrived]:
                pool.start(sequence)
        paused = False
        if self.capacity_scheduler_policy == "max_utilization":
            while pool.decode_blocks > pool.blocks.free:
                pool.preempt(max(pool.running, key=_by_arrival))
                paused = True
        waiting = [] if paused or not pool.waiting else self._fitting(pool)
        left = max(self.max_num_batched_tokens - pool.decode_tokens, 0)
        contexts = [
            (each, each.remaining_prompt)
            for each in pool.partials
            if self.ahead or not each.awaited
        ]
        contexts = self._cut([*contexts, *waiting], left, pool.blocks.block_size)
        if waiting and not contexts and not pool.running and not self.enable_chunked_prefill:
            raise LivelockError(
                f"max_num_tokens is {self.max_num_batched_tokens}, but a request has to compute "
                f"{waiting[0][1]} tokens at once (a paused one computes its output again): give "
                "more, or set enable_chunked_prefill"
            )
        return contexts

    def _fitting(self, pool: Pool) -> list[Context]:
        """The waiting requests that fit into the memory beside the running ones, in their order.
        Blocks for those whose prompt was computed elsewhere are reserved."""
        blocks = pool.blocks
        guaranteed = self.capacity_scheduler_policy == "guaranteed_no_evict"
        free = blocks.free - pool.decode_blocks
        if guaranteed:
            free = blocks.free - sum(
                _all_blocks(pool, each) - blocks.blocks(pool.held(each))
                for each in (*pool.running, *pool.loading)
            )
        found: list[Context] = []
        slots = self.max_num_seqs - len(pool.running) - len(pool.loading)
        for sequence in list(islice(pool.waiting, max(slots, 0))):
            remote = sequence.remote and sequence.order < 0
            hits = () if remote else blocks.lookup(sequence)
            need = blocks.need(sequence, sequence.target, hits)
            if guaranteed:
                need = _all_blocks(pool, sequence) + blocks.state_blocks
            alone = pool.vacant and not found
            if sequence.stale or (need > free and not alone):
                break
            free -= need
            if remote:
                if blocks.need(sequence, sequence.remote) > blocks.free:
                    break
                pool.reserve(sequence)
                continue
            found.append((sequence, sequence.target - len(hits) * blocks.block_size))
        return found

    def _serve_decodes(self, pool: Pool) -> int:
        """Returns the tokens that the decodes process."""
        left = self.max_num_batched_tokens
        if pool.decode_tokens <= left:
            return pool.decodes_all() if pool.num_decodes else 0
        for sequence in [each for each in pool.eligible() if each not in pool.partials]:
            if (tokens := pool.remaining(sequence)) > left:
                break
            pool.run(sequence, tokens)
            left -= tokens
        return self.max_num_batched_tokens - left

    def _cut(self, contexts: list[Context], left: int, unit: int) -> list[Context]:
        """The contexts, cut to the tokens that each may process now, at most ``left`` in all."""
        found: list[Context] = []
        for sequence, rest in contexts:
            tokens = min(rest, left)
            if tokens < rest:
                if not self.enable_chunked_prefill:
                    break
                tokens = tokens // unit * unit
            if tokens:
                found.append((sequence, tokens))
                left -= tokens
        return found

    def _wait(self, pool: Pool, contexts: list[Context], decodes: int) -> bool:
        """Whether the prompts wait for more to come."""
        tokens = decodes + sum(tokens for _, tokens in contexts)
        waited = pool.state.get("waited", 0)
        enough = self.batch_wait_max_tokens_ratio * self.max_num_batched_tokens
        wait = waited < self.batch_wait_timeout_iters and tokens < enough
        pool.state["waited"] = waited + 1 if wait else 0
        return wait


def _all_blocks(pool: Pool, sequence: Sequence) -> int:
    """The blocks of a sequence at its largest length."""
    most = sequence.prompt_tokens + sequence.max_tokens + pool.most_drafts
    return pool.blocks.blocks(most)


def _serve_contexts(pool: Pool, contexts: list[Context]) -> None:
    """Run the prompts. A first chunk takes blocks for the whole prompt."""
    blocks = pool.blocks
    for sequence, tokens in contexts:
        if sequence in pool.running:
            pool.run(sequence, tokens)
            continue
        # The contexts before it may have evicted blocks of its prefix, or added some.
        hits = blocks.lookup(sequence)
        if blocks.need(sequence, sequence.target, hits) > blocks.free:
            return
        rest = sequence.target - len(hits) * blocks.block_size
        pool.admit(sequence, min(tokens, rest), hits, hold=sequence.target)
