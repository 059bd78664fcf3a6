"""The specification of an engine of several ranks: model, degrees, sizes. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS

if TYPE_CHECKING:
    from sarathi_sim.profiler.engine.stage import StageShape


@dataclass(frozen=True)
class EngineSpec:
    """An engine of ``pp`` stages of ``tp`` ranks, a process each, on CPU cores or a GPU each.

    ``layers`` are those of each stage. A rank holds ``slots`` sequences of ``max_length`` tokens; a
    micro-batch has at most ``max_tokens`` rows. With ``num_blocks`` memory is paged, in blocks of
    ``block_size`` tokens, one of which is never used; else each sequence has one block, which holds
    all of it. ``threads`` are torch's on a CPU; ``realtime`` asks for SCHED_FIFO.
    """

    model: ModelSpec
    layers: tuple[int, ...]
    tp: int
    slots: int
    max_length: int
    max_tokens: int
    num_blocks: int = 0
    block_size: int = 0
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
    def blocks(self) -> tuple[int, int]:
        """Blocks of the KV cache, and the tokens of each."""
        if self.num_blocks:
            return self.num_blocks - 1, self.block_size
        return self.slots, self.max_length

    def table(self, slot: int) -> tuple[int, ...]:
        """The blocks of a made-up sequence: others may have them too, where there are few."""
        blocks, block_size = self.blocks
        each = -(-self.max_length // block_size)
        return tuple((slot * each + i) % blocks for i in range(each))

    @property
    def most_words(self) -> int:
        """Words that describe a micro-batch
        (:meth:`~sarathi_sim.profiler.engine.work.Work.encode`)."""
        return 16 + (4 + len(self.table(0))) * self.slots + self.max_tokens

    def stage(self, number: int) -> StageShape:
        """What rank ``number`` holds; the ranks of a stage are neighbours."""
        from sarathi_sim.profiler.engine.stage import StageShape

        stage, tp_rank = divmod(number, self.tp)
        first = sum(self.layers[:stage])
        return StageShape(
            self.model, first, first + self.layers[stage], self.tp, tp_rank,
            *self.blocks, self.seed,
        )  # fmt: skip

    def bytes_needed(self, number: int) -> int:
        """Of one rank: weights, tables, KV caches, message buffers, a micro-batch's activations at
        the widest GEMM, and the largest matrix as it is drawn, whole and in fp32."""
        stage = number // self.tp
        hidden = self.model.hidden_size
        gemms, kv_heads = self.model.gemms(self.tp), self.model.heads_per_rank(self.tp)[1]
        inside = [gemms[op] for op in LAYER_GEMMS]
        layer = self.model.layer_weights(self.tp)
        blocks, block_size = self.blocks
        layer += 2 * blocks * block_size * kv_heads * self.model.head_dim
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
    """As JSON, for the ranks."""
    path.write_text(json.dumps(asdict(spec)), encoding="utf-8")


def read_spec(path: Path) -> EngineSpec:
    """What :func:`write_spec` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"] = ModelSpec(**content["model"])
    content["layers"] = tuple(content["layers"])
    return EngineSpec(**content)
