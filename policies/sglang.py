"""SGLang's scheduler, with the names it gives its settings.

Source: SGLang 0.5.23, ``sglang/srt/managers/scheduler.py`` (``get_next_batch_to_run``),
``schedule_policy.py`` (``PrefillAdder``), ``schedule_batch.py`` (``retract_decode``),
``mem_cache/prefill_budget.py`` and ``scheduler_components/`` (``new_token_ratio_tracker.py``,
``recv_skipper.py``). Its decisions are reproduced call by call (``sarathi-sim lab lockstep``).
"""

from __future__ import annotations

from functools import partial, reduce
from operator import add
from typing import ClassVar, Literal

from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.policy import Chunking, named
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.radix import RadixBlocks, common_tokens
from sarathi_sim.policies.request import Sequence, check_at_least_1, release_of

CLIP_MAX_NEW_TOKENS = 4096
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20
LPM_MOST_WAITING = 128
"""With more waiting requests, longest prefix match becomes first come, first served."""
LPM_SHARED = 32
"""Among requests that share so many tokens and have no more cached, all but the first wait on."""
LEAST_MAX_RUNNING = 2048
"""Lower bound of the engine's own limit of running requests (at most half its KV tokens):
``resolve_max_num_reqs`` of ``mem_cache/kv_cache_configurator.py``."""
TOUCH_EVERY = 32
"""Looks at the queue after which the waiting requests' cached tokens count as used again."""

RESERVED_DECODE_TOKENS = 512
"""Tokens for which a decode worker keeps memory free beside each request that it holds
(``num_reserved_decode_tokens``)."""
FEW_RUNNING = 32
"""With at most so many running requests, twice as many more may wait for their KV on a decode
worker (``disaggregation_decode_extra_slots``), else none."""

SchedulePolicy = Literal["fcfs", "lpm", "lof"]


@named("sglang")
class Sglang(PoolPolicy):
    """Prompts before decodes: decodes wait while a prompt can be served (or join it, if mixed).

    A prefill batch takes prompts up to ``max_prefill_tokens`` and ``chunked_prefill_size`` tokens,
    each prompt counted in whole pages. The prompt that does not fit is cut, and continues first in
    the next batch. A request is admitted if the free memory holds its whole length and the expected
    growth of the running requests: ``new_token_ratio`` of the tokens they may generate. The ratio
    starts at 0.7 x ``schedule_conservativeness`` and falls with every decode. If it was too low,
    the requests that have generated least are retracted. ``enable_mixed_chunk`` lets the decodes
    join a prefill batch. A page is a block of the KV cache. While requests decode, new ones are
    looked for every ``scheduler_recv_interval`` iterations only; after a prefill batch at once.
    ``ignore_eos`` says that requests generate all their declared tokens: all are expected.
    ``version`` is SGLang's: ``data/engines/sglang.yaml`` says what depends on it.

    On a prefill worker a request counts as running until its KV was sent. (Source:
    ``managers/scheduler.py``, ``get_num_allocatable_reqs``.)

    A request whose prompt is computed elsewhere gets memory for it as soon as 512 tokens are left
    beside it and each request that holds memory; its KV may be sent then. Once that is there, it
    joins the decodes as soon as fewer than ``max_running_requests`` run. If it is retracted, its KV
    is kept in the host's memory, and it is served again before others get memory. (Source:
    ``disaggregation/decode.py``, ``process_decode_queue``.)
    """

    speculates = True
    drops = True
    cached_blocks = RadixBlocks
    memory_share = "mem_fraction_static"
    needs: ClassVar = {"enable_mixed_chunk": "chunked_prefill_size"}

    def __init__(
        self,
        chunked_prefill_size: int | None = 8192,
        max_prefill_tokens: int = 16384,
        max_running_requests: int = LEAST_MAX_RUNNING,
        schedule_conservativeness: float = 1.0,
        schedule_policy: SchedulePolicy = "fcfs",
        enable_mixed_chunk: bool = False,
        disable_overlap_schedule: bool = False,
        scheduler_recv_interval: int = 1,
        ignore_eos: bool = False,
        version: str = "0.5.23",
    ) -> None:
        release_of(version)
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
        self.enable_mixed_chunk = enable_mixed_chunk and chunked_prefill_size is not None
        self.ahead = not disable_overlap_schedule
        self.scheduler_recv_interval = scheduler_recv_interval
        self.ignore_eos = ignore_eos
        self.version = version
        self.initial_ratio = min(INIT_NEW_TOKEN_RATIO * schedule_conservativeness, 1.0)
        self.least_ratio = self.initial_ratio * MIN_NEW_TOKEN_RATIO_FACTOR
        self.decay = (self.initial_ratio - self.least_ratio) / NEW_TOKEN_RATIO_DECAY_STEPS
        # Without chunks the first prompt may be of any length.
        self.chunking: Chunking | None = None
        if chunked_prefill_size is not None:
            most = max(chunked_prefill_size, max_running_requests)
            self.chunking = Chunking(most, most)

    def plan(self, pool: Pool) -> None:
        """A prefill batch if there can be one, else the decodes.

        ``state["full"]``: no request is admitted until one leaves. ``decoding``: sequences in the
        engine's "running batch". The sequences of the last prefill batch (``joining``) join it now;
        ``cut``: whether one of their prompts was cut. ``ratio``: the share of the tokens that
        requests may generate that they are expected to generate.
        """
        state = pool.state
        if state.get("emptied") != pool.emptied:
            state.update(emptied=pool.emptied, ratio=self.initial_ratio)
            for name in ("full", "decoding", "joining", "cut", "prefilled", "looks"):
                state.setdefault(name, 0)
        for sequence in pool.partials:
            pool.blocks.computed(sequence, sequence.prefilled)
        if pool.remote:
            self._preallocate(pool)
        decoding, before = len(pool.running) - len(pool.partials), state["decoding"]
        if joining := state["joining"]:
            before, state["joining"] = before and before + joining, 0
        # A request left, or the engine's running batch is a new object.
        if decoding < before or not before or state["cut"]:
            state["full"] = state["cut"] = False
        state["decoding"] = decoding
        if self.scheduler_recv_interval > 1:
            self._receive(pool)
        state["prefilled"] = self._prefill(pool)
        if decoding and not state["prefilled"]:
            self._decode(pool)

    def _receive(self, pool: Pool) -> None:
        """Look for new requests if it is time; ``state["received"]`` are the waiting requests that
        the engine has seen."""
        state = pool.state
        known: set[int] = state.setdefault("received", set())
        decodes = state.get("unseen", 0) + 1
        if not pool.running or state["prefilled"] or decodes >= self.scheduler_recv_interval:
            new = [each for each in pool.waiting if each.id not in known]
            self._reorder(pool, [each for each in pool.waiting if each.id in known], new)
            known.update(each.id for each in new)
            decodes = 0
        state["unseen"] = decodes

    # What a decode worker does first -------------------------------------------------------------

    def _preallocate(self, pool: Pool) -> None:
        """Give requests memory whose KV is computed elsewhere, and start those whose KV is there.
        Raises LivelockError if the memory is too small for a request that has it for itself."""
        few = self.max_num_seqs <= FEW_RUNNING
        slots = self.max_num_seqs * (3 if few else 1) - len(pool.running) - len(pool.loading)
        waiting = [each for each in pool.waiting if each.remote]
        waiting.sort(key=lambda each: each.order < 0)  # retracted ones first
        for sequence in waiting:
            if slots <= 0 or sequence.stale or not self._may_hold(pool, sequence):
                break
            slots -= 1
            pool.blocks.reserve(pool.blocks.blocks(sequence.remote))
            pool.reserve(sequence)
        rows = self.max_num_seqs - len(pool.running)
        arrived = [each for each in pool.loading if each.arrived]
        for sequence in arrived[: max(rows, 0)]:
            pool.start(sequence)

    def _may_hold(self, pool: Pool, sequence: Sequence) -> bool:
        """Whether memory for a request whose KV is computed elsewhere, and for growth, is free."""
        blocks, running = pool.blocks, pool.running
        page = blocks.block_size
        held = RESERVED_DECODE_TOKENS * (len(running) + len(pool.loading))
        need = blocks.blocks(sequence.remote) * page + RESERVED_DECODE_TOKENS
        if sequence.order < 0:  # one request must be able to finish, if all others are retracted
            ends = [
                each.prompt_tokens + min(each.max_tokens, CLIP_MAX_NEW_TOKENS)
                for each in (*running, sequence)
            ]
            retractable = sum(each.prompt_tokens for each in running) + sum(pool.generated(running))
            need = max(need, ends.pop() - retractable)
            held = max(held, max(ends, default=retractable) - retractable)
        if need > blocks.free * page - held:
            if pool.vacant:
                raise LivelockError(
                    f"request {sequence.id} waits for {need} free tokens, but the KV cache holds "
                    f"{blocks.capacity * page}: give it more"
                )
            return False
        return True

    # Prefill -------------------------------------------------------------------------------------

    def _prefill(self, pool: Pool) -> bool:
        """Form a prefill batch; returns whether there is one."""
        state = pool.state
        if not pool.partials and (state["full"] or not pool.waiting):
            return False
        blocks = pool.blocks
        cut = sorted(pool.partials, key=lambda each: each.order)
        # A row of the engine's table of requests is held until the KV of its request was sent.
        rows = self.max_num_seqs - state["decoding"] - len(pool.sending)
        if not cut and rows <= 0:
            state["full"] = True
            return False
        queue = self._in_order(pool)
        if not cut and not queue:
            return False
        budget, blank = _Budget(self, pool), blocks.blank
        for sequence in cut:
            self._go_on(pool, budget, sequence)
        for sequence in queue:
            if budget.spent:
                break
            if len(budget.given) >= rows:
                state["full"] = True
            if state["full"]:
                break
            if sequence.stale:
                continue  # its tokens from before it was retracted are still to come
            if not self._add(pool, budget, sequence):
                break
        if not budget.given:
            return False
        blocks.reserve(budget.pages - (blank - blocks.blank))
        state.update(joining=len(budget.given) - budget.cut, cut=budget.cut)
        if self.enable_mixed_chunk and state["decoding"]:
            self._mix(pool, budget)
        return True

    def _go_on(self, pool: Pool, budget: _Budget, sequence: Sequence) -> None:
        """Continue a cut prompt."""
        rest, memory = sequence.remaining_prompt, int(budget.memory)
        tokens = min(rest, int(budget.chunk))
        if 0 < memory < tokens:
            tokens = memory
        # (The engine takes it for granted that there are free pages.)
        pages = pool.blocks.blocks(sequence.prefilled) + pool.blocks.free
        tokens = min(tokens, pages * budget.page - sequence.prefilled)
        if tokens > 0:
            pool.run(sequence, tokens)
            budget.charge(sequence, tokens, rest)

    def _in_order(self, pool: Pool) -> list[Sequence]:
        """The waiting requests, in the order in which admission tries them."""
        queue, others, state = list(pool.waiting), [], pool.state
        if pool.remote:
            others = [each for each in queue if each.remote]
            queue = [each for each in queue if not each.remote]
        if (known := state.get("received")) is not None:
            others += [each for each in queue if each.id not in known]
            queue = [each for each in queue if each.id in known]
        if self.schedule_policy == "lof":
            queue.sort(key=lambda each: -each.max_tokens)
        if not pool.blocks.caching or not queue:
            return queue
        if self.schedule_policy == "lpm" and len(queue) <= LPM_MOST_WAITING:
            self._sort_by_prefix(pool, queue)
            self._reorder(pool, queue, others)
            return queue
        if state["looks"] % TOUCH_EVERY == 0:
            for sequence in reversed(queue[:LPM_MOST_WAITING]):
                pool.blocks.touch(sequence)
        state["looks"] += 1
        return queue

    def _sort_by_prefix(self, pool: Pool, queue: list[Sequence]) -> None:
        """Sort by the longest cached prefix. Of requests that share an uncached prefix, the first
        keeps its place, and the others go last."""
        keys: dict[Sequence, float] = {}
        firsts: list[Sequence] = []
        for sequence in queue:
            cached = pool.blocks.touch(sequence)
            keys[sequence] = -min(cached, sequence.target - 1)
            if cached <= LPM_SHARED <= sequence.shared_tokens:
                if any(common_tokens(sequence, each) >= LPM_SHARED for each in firsts):
                    keys[sequence] = 1.0
                else:
                    firsts.append(sequence)
        queue.sort(key=keys.__getitem__)

    def _reorder(self, pool: Pool, queue: list[Sequence], others: list[Sequence]) -> None:
        pool.waiting.clear()
        pool.waiting.extend(queue + others)

    def _add(self, pool: Pool, budget: _Budget, sequence: Sequence) -> bool:
        """Admit a sequence, cut if need be; returns whether the next one may be tried."""
        blocks, page = pool.blocks, budget.page
        hits = blocks.lookup(sequence)
        rest = sequence.target - len(hits) * page
        whole = blocks.blocks(rest) * page
        locked = blocks.need(sequence, sequence.target, hits) * page - whole
        counted = self.ignore_eos and not blocks.caching
        if not pool.vacant and not (
            budget.can_finish(sequence, whole + page)
            if counted
            else budget.fits(sequence, rest + page + locked)
        ):
            pool.state["full"] = bool(budget.given or pool.state["decoding"])
            return False
        another = self.chunked_prefill_size is None and budget.given and not counted
        if another and whole >= budget.input:
            return False
        tokens = rest
        if counted and rest > budget.chunk:
            tokens = int(budget.chunk)
        elif not counted and whole > budget.chunk:
            tokens = int(budget.chunk) // page * page
        if tokens <= 0:
            return False
        budget.free -= locked
        pool.admit(sequence, tokens, hits)
        budget.charge(sequence, tokens, rest)
        if budget.memory <= 0:
            pool.state["full"] = True
            return False
        return True

    # Decode --------------------------------------------------------------------------------------

    def _mix(self, pool: Pool, budget: _Budget) -> None:
        """Let the decodes join the prefill batch, if the memory suffices."""
        state = pool.state
        if pool.drained:
            state["full"] = False
        state["decoding"] = pool.num_decodes
        pool.blocks.reserve(pool.decode_blocks)
        if pool.num_decodes and pool.decode_blocks <= pool.blocks.free:
            pool.blocks.reserve(pool.num_decodes)
            if budget.decoding[0].order < budget.given[-1].order:
                pool.put_back(budget.decoding)
            pool.decodes_all()
            state.update(joining=state["joining"] + state["decoding"], decoding=0)

    def _decode(self, pool: Pool) -> None:
        """Schedule all decodes, except sequences whose last token is in flight."""
        state, blocks, fits = pool.state, pool.blocks, pool.decode_blocks <= pool.blocks.free
        if fits and pool.num_decodes:
            ratio = state["ratio"] - self.decay
            state["ratio"] = ratio if ratio > self.least_ratio else self.least_ratio
        elif not fits:
            blocks.reserve(pool.decode_blocks)
            if not pool.drained:  # (drained sequences free their memory soon)
                self._retract(pool)
                fits = pool.decode_blocks <= blocks.free
        if pool.num_decodes < state["decoding"]:
            state.update(decoding=pool.num_decodes, full=False)
        if fits and pool.num_decodes:
            blocks.reserve(max(pool.num_decodes, pool.decode_blocks))  # (more only with drafts)
            pool.decodes_all()

    def _retract(self, pool: Pool) -> None:
        """Retract the requests that generated least, longest prompts first, until the rest fits."""
        decoding = [each for each in pool.eligible() if each not in pool.partials]
        keys = dict(zip(decoding, pool.generated(decoding), strict=True))
        decoding.sort(key=lambda each: (-keys[each], each.prompt_tokens))
        blocks = pool.blocks
        # (The engine aborts the last request, if it does not fit alone.)
        while decoding and pool.decode_blocks > blocks.free:
            victim = decoding.pop()
            pool.preempt(victim, last=True)
            victim.remote = victim.remote and victim.target - 1
            blocks.reserve(blocks.blocks(len(decoding) * RETRACT_DECODE_STEPS))
            blocks.reserve(pool.decode_blocks)
        pool.put_back(decoding)
        total = sum(keys[each] for each in decoding)
        most = sum(each.max_tokens for each in decoding)
        estimate = (total + RETRACT_DECODE_STEPS * len(decoding)) / (most + 1)
        pool.state["ratio"] = min(1.0, estimate) if decoding else self.initial_ratio


class _Budget:
    """The rest of a prefill batch's budgets: ``input`` and ``chunk`` tokens, and ``memory``, the
    tokens that no request holds or is expected to take.

    ``decoding`` are the running sequences past their prompts, ``given`` the sequences in the batch;
    ``cut`` says whether one of their prompts is cut.
    """

    def __init__(self, policy: Sglang, pool: Pool) -> None:
        self.page = pool.blocks.block_size
        self.ratio = 1.0 if policy.ignore_eos else pool.state["ratio"]
        self.decoding = list(pool.running)
        for each in pool.partials:
            self.decoding.remove(each)
        mixed = len(self.decoding) if policy.enable_mixed_chunk else 0
        self.input: float = policy.max_prefill_tokens - mixed
        size = policy.chunked_prefill_size
        self.chunk: float = float("inf") if size is None else size - mixed
        self.free = pool.blocks.free * self.page
        self.taken = mixed
        self.expected: float = mixed
        self.counted = False  # whether ``expected`` includes the running requests
        self.generated = partial(pool.generated, self.decoding)
        self.given: list[Sequence] = []
        self.cut = False
        self.tokens = 0
        self._ends: list[tuple[int, int]] | None = None

    @property
    def memory(self) -> float:
        """Tokens that no request holds or is expected to take."""
        if not self.counted:
            self.counted, ratio, clip = True, self.ratio, CLIP_MAX_NEW_TOKENS
            growth = (
                (left if (left := each.max_tokens - tokens) < clip else clip) * ratio
                for each, tokens in zip(self.decoding, self.generated(), strict=True)
            )
            # (Added one by one, as the engine does. Later versions of Python's `sum` do not.)
            self.expected += reduce(add, growth, 0.0)
        return self.free - self.expected

    @property
    def pages(self) -> int:
        """Pages that the engine makes room for: one more than needed for each prompt."""
        if self.page == 1:
            return self.tokens
        return -(-self.tokens // self.page) + len(self.given)

    @property
    def spent(self) -> bool:
        """Whether a token budget is used up, but not the memory (which each prompt checks)."""
        return (self.input <= 0 or self.chunk <= 0) and self.memory > 0

    def fits(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the memory holds a waiting sequence's ``tokens`` and its expected output."""
        left, _ = _end(sequence, sequence.target - sequence.prompt_tokens)
        tokens += min(max(left, 0), CLIP_MAX_NEW_TOKENS)
        return tokens < self.free and tokens < self.memory  # (slower to compute, so last)

    def charge(self, sequence: Sequence, tokens: int, rest: int) -> None:
        """Charge a prompt's tokens, in whole pages, and its expected output if it is not cut."""
        pages = -(-tokens // self.page) * self.page
        self.input -= pages
        self.chunk -= pages
        self.taken += pages + self.page
        self.expected += pages + self.page
        if tokens < rest:
            self.cut = True
        else:
            self.expected += min(sequence.max_tokens, CLIP_MAX_NEW_TOKENS)
        self.tokens += tokens
        self.given.append(sequence)

    def can_finish(self, sequence: Sequence, paged: int) -> bool:
        """Whether all requests of known length can finish, if each frees its memory for later ones.
        ``paged`` are the tokens that the sequence takes at once."""
        if paged > min(self.free - self.taken, self.memory):
            return False
        own = _end(sequence, sequence.target - sequence.prompt_tokens)
        if self._ends is None:
            ends = [own, *map(_end, self.decoding, self.generated())]
            ends += [_end(each, each.target - each.prompt_tokens) for each in self.given]
            self._ends = sorted((each for each in ends if each[0] > 0), key=lambda end: end[0])
        elif own[0] > 0:
            ends = self._ends
            later = (i for i, end in enumerate(ends) if own[0] <= end[0])
            ends.insert(next(later, max(len(ends) - 1, 0)), own)  # (as the engine does)
        left = self.free - self.taken - paged
        for place, (tokens, held) in enumerate(self._ends):
            size = len(self._ends) - place
            if left - tokens * size <= size:
                return False
            left += held
        return True


def _end(sequence: Sequence, generated: int) -> tuple[int, int]:
    """The tokens that a sequence has still to generate, and the tokens that it holds now."""
    return sequence.max_tokens - generated, sequence.prompt_tokens + generated
