"""The engine's bookkeeping of its sequences: prompts, tokens, KV blocks, ends. No torch.

Rank 0 keeps it. The scheduler handles sequences, the stages handle blocks: :class:`Book`
translates. It tells the scheduler which sequences have ended, because the scheduler knows no output
length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.catalogue import is_pooled, of_micro_batches
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.radix import RadixBlocks
from sarathi_sim.policies.request import Cohort, Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.engine.blocks import BlockTables, RadixTables
from sarathi_sim.profiler.engine.spec import EngineError, Work


class Prompts:
    """Draws the prompt of each request, from ``seed`` and its id; a shared prefix, from its name.

    Each name of a :data:`~sarathi_sim.policies.request.Prefix` has the tokens from the beginning
    on, so that a turn of a session begins with the earlier turns, generated tokens included.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed
        self._named: dict[Hashable, tuple[list[int], np.random.Generator]] = {}

    def draw(self, request: Request) -> list[int]:
        """The token ids of a prompt."""
        tokens: list[int] = []
        for name, until in request.prefix:
            digest = sha256(str(name).encode()).digest()[:8]
            rng = np.random.default_rng([self._seed, int.from_bytes(digest)])
            named, rng = self._named.setdefault(name, (list(tokens), rng))
            until = min(until, request.prompt_tokens)
            named += rng.integers(self._vocab_size, size=max(until - len(named), 0)).tolist()
            tokens += named[len(tokens) : until]
        own = np.random.default_rng([self._seed, request.id])
        rest = request.prompt_tokens - len(tokens)
        tokens += own.integers(self._vocab_size, size=rest).tolist()
        return tokens

    def generated(self, request: Request, tokens: list[int]) -> None:
        """Note the last of a request's ``tokens``, if others may begin with it.

        Raises EngineError where one has begun with another token.
        """
        for name, until in request.prefix:
            if len(tokens) > until:
                continue
            named = self._named[name][0]
            if len(named) < len(tokens):
                named.append(tokens[-1])
            elif named[len(tokens) - 1] != tokens[-1]:
                raise EngineError(
                    f"a request that goes on from request {request.id} came before that had ended: "
                    "its prompt is not known then"
                )


class Book:
    """Tokens and KV blocks of every sequence, and the ends of sequences
    (:class:`~sarathi_sim.policies.scheduler.Endings`).

    A request ends with its ``output_tokens``-th token; with ``eos`` (a token id) when this token is
    generated, or with its ``max_tokens``-th. A :class:`~sarathi_sim.policies.pool.Pool` assigns
    blocks itself; for :class:`~sarathi_sim.policies.micro_batches.MicroBatches` every sequence has
    one block of its largest length. ``num_blocks`` includes one that is never used. For the rest
    see :class:`~sarathi_sim.profiler.engine.blocks.BlockTables`.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int,
        seed: int = 0,
        prefix_caching: bool = False,
        eos: int | None = None,
        on_new: Callable[[int], object] = lambda number: None,
    ) -> None:
        self._requests = {request.id: request for request in requests}
        self._prompts = Prompts(vocab_size, seed)
        self._eos = eos
        known = self.tokens if prefix_caching else None
        self.blocks: BlockTables | RadixTables = BlockTables(num_blocks, block_size, known, on_new)
        self._radix = partial(RadixTables, num_blocks, block_size, on_new)
        self._tokens: dict[int, list[int]] = {}
        self._over: set[int] = set()
        self._ended: dict[Batch, list[Sequence]] = {}

    def scheduler(self, policy: Policy | PoolPolicy, settings: dict[str, Any]) -> Scheduler:
        """A scheduler or pool with these blocks, and this book as its ``Endings``."""
        if is_pooled(policy):
            if self.blocks.caching and policy.cached_blocks is RadixBlocks:
                self.blocks = self._radix()
            return Pool(policy, self.blocks, endings=self, **settings)
        return MicroBatches(of_micro_batches(policy), endings=self, **settings)

    @property
    def outputs(self) -> dict[int, list[int]]:
        """Generated tokens of each started request."""
        return {
            id: tokens[self._requests[id].prompt_tokens :] for id, tokens in self._tokens.items()
        }

    def tokens(self, sequence: Sequence) -> list[int]:
        """A sequence's prompt and its generated tokens."""
        found = self._tokens.get(sequence.id)
        if found is None:
            found = self._prompts.draw(self._requests[sequence.id])
            self._tokens[sequence.id] = found
        return found

    def waits(self, batch: Batch) -> bool:
        """Whether a decode continues from a token that has not returned yet."""
        return any(
            self._context(sequence, batch) >= len(self.tokens(sequence))
            for sequence in batch.decodes
            if sequence.id not in self._over
        )

    def _context(self, sequence: Sequence, batch: Batch) -> int:
        """KV tokens of a decode before a batch; the context of padding does not grow."""
        if batch.padding and sequence.id in self._over:
            return len(self.tokens(sequence)) - 1
        return sequence.offset + batch.iteration

    def work(self, index: int, batch: Batch) -> tuple[Work, list[Sequence]]:
        """The work of a batch just formed, and the sequence of each output.

        Raises EngineError if more sequences are admitted than there are blocks for, or if a
        sequence decodes whose last token no batch computes.
        """
        chunks, decodes, owners = [], [], []
        rows: list[int] = []
        yields = set(batch.yields)
        for sequence, count, context in batch.chunks:
            if sequence not in self.blocks:
                self.blocks.take(sequence, 1)
            tokens = self.tokens(sequence)
            ends = sequence in yields
            chunks.append((self.blocks.table(sequence, context + count), count, context, int(ends)))
            rows += tokens[context : context + count]
            if ends:
                owners.append(sequence)
        for sequence in batch.decodes:
            context, tokens = self._context(sequence, batch), self.tokens(sequence)
            decodes.append((self.blocks.table(sequence, context + 1), context))
            if context >= len(tokens):
                if sequence.id not in self._over:
                    raise EngineError(f"{sequence} decodes before its last token is there")
                context = -1  # it has ended meanwhile; this decode is dropped
            rows.append(tokens[context])
            owners.append(sequence)
        return Work(index, tuple(chunks), tuple(decodes), np.array(rows, np.int32)), owners

    def book(self, batch: Batch, owners: list[Sequence], tokens: list[int]) -> None:
        """Append the tokens of a batch; those of ended sequences (padding) are dropped."""
        ended = self._ended[batch] = []
        for sequence, token in zip(owners, tokens, strict=True):
            if sequence.id in self._over:
                continue
            request, known = self._requests[sequence.id], self._tokens[sequence.id]
            known.append(token)
            self._prompts.generated(request, known)
            most = request.output_tokens if self._eos is None else request.max_tokens
            if token == self._eos or len(known) == request.prompt_tokens + most:
                self._over.add(sequence.id)
                ended.append(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free the block of a sequence that
        :class:`~sarathi_sim.policies.micro_batches.MicroBatches` are done with."""
        if sequence in self.blocks:
            self.blocks.release(sequence, 1, 0, again=False)

    # Endings, for the scheduler -------------------------------------------------------------------

    def added(self, request: Request) -> None:
        """A request was accepted: the book knows it already."""

    def joined(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes: its tokens will show its end."""

    def left(self, sequence: Sequence, cohort: Cohort) -> None:
        """A sequence decodes no longer."""

    def preempted(self, sequence: Sequence) -> None:
        """A sequence has to compute its tokens again."""

    def accepted(self, sequence: Sequence, drafts: int) -> int:
        """How many of its drafts hold: this engine has no drafter."""
        return 0

    def none_end(self, batch: Batch) -> int:
        """An engine learns it from the tokens."""
        return 0

    def ended(self, batch: Batch, dropped: Collection[Sequence] = ()) -> list[Sequence]:
        """The sequences whose last token this batch yields; ``dropped`` ones lose theirs."""
        for sequence in dropped:
            self._tokens[sequence.id].pop()
            self._over.discard(sequence.id)
        return [sequence for sequence in self._ended.pop(batch) if sequence not in dropped]
