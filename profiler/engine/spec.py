"""The input of an engine's ranks: its specification (model, degrees, sizes), and each micro-batch
as slots of the KV cache, lengths and token ids. No torch.

The scheduler speaks of sequences; the stages know only slots, each with room for the longest
sequence. :class:`~sarathi_sim.profiler.engine.driver.Book` translates.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..facts.model import ModelSpec
from ..facts.ops import LAYER_GEMMS, names
from ..planning.grid import ProfileError

Words = npt.NDArray[np.int32]

#: The ops that a stage times within its layers, summed over them.
TIMED_OPS = names(lambda op: op.part == "layer" and not op.rest)


GridWork = tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]
"""The chunks and decodes of a synthetic :class:`Work`, whose tokens do not matter."""


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

    def encode(self) -> Words:
        """The work as int32 words; :meth:`decode` is the inverse."""
        numbers = [self.index, len(self.chunks), len(self.decodes)]
        numbers += chain(*self.chunks, *self.decodes)
        return np.concatenate([np.array(numbers, np.int32), self.tokens])

    @staticmethod
    def decode(words: Words) -> Work:
        """The work that :meth:`encode` wrote."""
        index, num_chunks, num_decodes = words[:3].tolist()
        decodes = 3 + 4 * num_chunks
        tokens = decodes + 2 * num_decodes
        chunks = words[3:decodes].reshape(-1, 4).tolist()
        alone = words[decodes:tokens].reshape(-1, 2).tolist()
        return Work(
            index,
            tuple((slot, count, context, ends) for slot, count, context, ends in chunks),
            tuple((slot, context) for slot, context in alone),
            words[tokens:],
        )


@dataclass(frozen=True)
class StageShape:
    """The part of one rank: layers ``first`` to ``last - 1`` of the model, each with a KV cache of
    ``slots`` of ``max_length`` tokens."""

    model: ModelSpec
    first: int
    last: int
    tp: int
    rank: int
    slots: int
    max_length: int
    seed: int = 0

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether it yields tokens."""
        return self.last == self.model.num_layers


@dataclass(frozen=True)
class EngineSpec:
    """An engine of ``pp`` stages of ``tp`` ranks, a process each, on CPU cores or a GPU each.

    ``layers`` has the layers of each stage. A rank holds ``slots`` sequences of ``max_length``
    tokens; a micro-batch has at most ``max_tokens`` rows. ``threads`` are torch's on a CPU;
    ``realtime`` asks for SCHED_FIFO.
    """

    model: ModelSpec
    layers: tuple[int, ...]
    tp: int
    slots: int
    max_length: int
    max_tokens: int
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    threads: int = 1
    realtime: bool = False

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.pp * self.tp

    @property
    def most_words(self) -> int:
        """Words that describe a micro-batch
        (:meth:`~sarathi_sim.profiler.engine.spec.Work.encode`)."""
        return 16 + 4 * self.slots + self.max_tokens

    def stage(self, number: int) -> StageShape:
        """The part of rank ``number``; the ranks of a stage are neighbours."""
        stage, tp_rank = divmod(number, self.tp)
        first = sum(self.layers[:stage])
        return StageShape(
            self.model, first, first + self.layers[stage], self.tp, tp_rank,
            self.slots, self.max_length, self.seed,
        )  # fmt: skip

    def bytes_needed(self, number: int) -> int:
        """The bytes of one rank: weights, tables, KV caches, message buffers, a micro-batch's
        activations at the widest GEMM, and the largest matrix as drawn, whole and in fp32."""
        stage = number // self.tp
        hidden = self.model.hidden_size
        gemms, kv_heads = self.model.gemms(self.tp), self.model.heads_per_rank(self.tp)[1]
        inside = [gemms[op] for op in LAYER_GEMMS]
        layer = self.model.layer_weights(self.tp)
        layer += 2 * self.slots * self.max_length * kv_heads * self.model.head_dim
        numbers = self.layers[stage] * layer
        if stage == 0:
            numbers += self.model.vocab_size * hidden
        if stage == self.pp - 1:
            numbers += gemms["lm_head"].n * hidden
        if self.pp > 1:
            numbers += 4 * (self.pp + 1) * self.max_tokens * hidden
        numbers += self.max_tokens * max(shape.n + shape.k for shape in inside)
        drawn = max(shape.n * shape.k for shape in self.model.gemms(1).values())
        return numbers * (4 if self.dtype == "float32" else 2) + 4 * drawn


def write_spec(spec: EngineSpec, path: Path) -> None:
    """Write a specification as JSON, for the ranks."""
    path.write_text(json.dumps(asdict(spec)), encoding="utf-8")


def read_spec(path: Path) -> EngineSpec:
    """Read the specification that :func:`write_spec` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"] = ModelSpec(**content["model"])
    content["layers"] = tuple(content["layers"])
    return EngineSpec(**content)
