"""A micro-batch as an engine's stages need it: slots, lengths and token ids. No torch.

The scheduler speaks of sequences; the stages know only slots of the KV cache. :class:`SlotBook`
translates, and keeps every sequence's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.batch import Batch
from policies.request import Request, Sequence
from profiler.facts.ops import names
from profiler.planning.profile_error import ProfileError

Words = npt.NDArray[np.int32]

#: What a stage times within its layers, summed over them.
TIMED_OPS = names(lambda op: op.part == "layer" and not op.rest)


class EngineError(ProfileError):
    """The engine cannot start or continue; the message says why."""


@dataclass(frozen=True)
class Work:
    """One micro-batch to execute; its rows are the chunks' tokens, then one for each decode.

    ``chunks``   ``(slot, tokens, context, yields)``: ``yields`` is 1 where it ends its prompt
    ``decodes``  ``(slot, context)``: the new token is written after ``context`` cached ones
    ``tokens``   the token id of every row, int32
    """

    index: int
    chunks: tuple[tuple[int, int, int, int], ...]
    decodes: tuple[tuple[int, int], ...]
    tokens: Words

    @property
    def num_tokens(self) -> int:
        """Rows of the fused linear ops."""
        return len(self.tokens)

    @property
    def num_outputs(self) -> int:
        """Rows that yield a token."""
        return sum(chunk[3] for chunk in self.chunks) + len(self.decodes)

    def encode(self) -> Words:
        """As int32 words; :meth:`decode` is the inverse."""
        sizes = [self.index, len(self.chunks), len(self.decodes)]
        flat = [*sizes, *(n for c in self.chunks for n in c), *(n for d in self.decodes for n in d)]
        return np.concatenate([np.array(flat, np.int32), self.tokens])

    @staticmethod
    def decode(words: Words) -> Work:
        """The work that :meth:`encode` wrote."""
        index, chunks, decodes = (int(n) for n in words[:3])
        middle, end = 3 + 4 * chunks, 3 + 4 * chunks + 2 * decodes
        of_chunks = words[3:middle].reshape(chunks, 4).tolist()
        of_decodes = words[middle:end].reshape(decodes, 2).tolist()
        return Work(
            index,
            tuple((slot, count, context, ends) for slot, count, context, ends in of_chunks),
            tuple((slot, context) for slot, context in of_decodes),
            words[end:],
        )


def prompt_tokens(request: Request, vocab_size: int, seed: int) -> list[int]:
    """The request's prompt: random token ids that depend on ``seed`` and its id alone."""
    rng = np.random.default_rng([seed, request.id])
    ids: list[int] = rng.integers(vocab_size, size=request.prompt_tokens).tolist()
    return ids


class SlotBook:
    """Slots of the KV cache and tokens of the sequences that a scheduler has admitted.

    ``slots`` sequences fit at a time. A freed slot is the next one to be used, so that a leak
    between requests shows.
    """

    def __init__(self, requests: list[Request], slots: int, vocab_size: int, seed: int) -> None:
        self._requests = {request.id: request for request in requests}
        self._vocab_size, self._seed = vocab_size, seed
        self._free = list(range(slots))[::-1]
        self._slot: dict[int, int] = {}
        self._prompt: dict[int, list[int]] = {}
        #: Generated tokens of each request.
        self.outputs: dict[int, list[int]] = {}

    def work(self, index: int, batch: Batch) -> tuple[Work, list[int]]:
        """The batch to execute, and the id of the request that each output belongs to.

        Raises EngineError where more sequences are admitted than there are slots.
        """
        chunks, decodes, owners = [], [], []
        tokens: list[int] = []
        for sequence, count, context in batch.chunks:
            slot = self._slot.get(sequence.id)
            if slot is None:
                slot = self._admit(sequence)
            ends = context + count == sequence.prompt_tokens
            chunks.append((slot, count, context, int(ends)))
            tokens += self._prompt[sequence.id][context : context + count]
            if ends:
                owners.append(sequence.id)
        for sequence in batch.decodes:
            generated = self.outputs[sequence.id]
            decodes.append((self._slot[sequence.id], sequence.prompt_tokens + len(generated) - 1))
            tokens.append(generated[-1])
            owners.append(sequence.id)
        return Work(index, tuple(chunks), tuple(decodes), np.array(tokens, np.int32)), owners

    def _admit(self, sequence: Sequence) -> int:
        if not self._free:
            raise EngineError(
                f"request {sequence.id} was admitted but all {len(self._slot)} KV slots are taken"
            )
        slot = self._slot[sequence.id] = self._free.pop()
        request = self._requests[sequence.id]
        self._prompt[sequence.id] = prompt_tokens(request, self._vocab_size, self._seed)
        self.outputs[sequence.id] = []
        return slot

    def book(self, owners: list[int], tokens: list[int]) -> None:
        """Append what a micro-batch generated; of a finished sequence (padding) nothing is kept."""
        for owner, token in zip(owners, tokens, strict=True):
            if len(self.outputs[owner]) < self._requests[owner].output_tokens:
                self.outputs[owner].append(token)

    def release(self, sequence: Sequence) -> int:
        """Free a finished sequence's slot; returns it."""
        slot = self._slot.pop(sequence.id)
        del self._prompt[sequence.id]
        self._free.append(slot)
        return slot
