"""The settings of a profile: the ops, their coarse grids and their limits; and points chosen
beforehand, of whole layers of mixed batches, and of decodes of unequal contexts. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Literal

import numpy as np

from ..facts.formats import Distribution, Kernels
from ..facts.model import ModelSpec
from ..facts.ops import ATTENTION, OPS
from .grid import Floats, Grid, Key, SizeGrid, Surface

TILE = 128
#: The attention backend: xformers where it works, else SDPA's flash or efficient kernel; or one
#: and nothing else: cudnn is SDPA's cuDNN kernel, fa3 FlashAttention 3 in SDPA.
AttentionChoice = Literal["auto", "xformers", "sdpa", "cudnn", "fa3"]
#: How the L2 of a GPU is made cold before each sample; see profiler/shard/timing.py.
FlushMode = Literal["write", "read", "rotate"]


@dataclass(frozen=True)
class Limits:
    """The largest sizes to measure.

    ``max_tokens``: tokens of a batch (linear ops). ``max_context``: chunk + cached tokens of one
    sequence. ``max_batch``: sequences of a decode batch, and rows of the LM head.
    """

    max_tokens: int
    max_context: int
    max_batch: int


@dataclass(frozen=True)
class Settings:
    """The settings of a profile.

    ``target`` is the held-out error (a fraction) at which the adaptive grid stops, ``budget_s`` the
    seconds for all of ``tps`` together after which it stops anyway (the coarse grid is always
    measured whole). ``inter_node`` is a file of :mod:`sarathi_sim.profiler.measuring.ranks`.
    ``collectives`` is a bundle (or the folder of its tp<k>) to take the collectives from.
    ``force`` replaces bundles that were measured already. ``ops`` are all that is measured, if any
    are named: the journal keeps them, and a run without completes the bundle. ``weights``: the
    number format of the layer's GEMMs. ``expert_distribution``: how tokens spread over a mixture's
    experts. ``max_s`` are seconds after which nothing more is measured at all. ``sustained_s``: how
    long a layer is run without a pause, on a GPU.
    """

    model: ModelSpec
    tps: tuple[int, ...]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float16", "bfloat16", "float32"]
    out: Path
    limits: Limits
    device_name: str | None = None
    budget_s: float = 60.0
    target: float = 0.03
    repeats: int = 5
    threads: int = 1
    inter_node: Path | None = None
    collectives: Path | None = None
    attention: AttentionChoice = "auto"
    force: bool = False
    weights: Literal["dtype", "fp8"] = "dtype"
    expert_distribution: Distribution = Kernels.expert_distribution
    flush: FlushMode = "read"
    ops: tuple[str, ...] = ()
    max_s: float = math.inf
    sustained_s: float = 20.0

    @property
    def local_ops(self) -> tuple[str, ...]:
        """The ops that one rank of the model computes alone."""
        return (*self.model.row_ops, *ATTENTION)


def default_limits(device: str, max_position: int) -> Limits:
    """For a device type ("cpu", "cuda") and a model's longest sequence."""
    if device == "cpu":
        return Limits(max_tokens=1024, max_context=min(2048, max_position), max_batch=32)
    return Limits(max_tokens=8192, max_context=min(8192, max_position), max_batch=256)


def coarse_grid(op: str, limits: Limits) -> list[Key]:
    """The points to start from, ascending; every op's largest one is among them."""
    if OPS[op].family == "prefill":
        half = limits.max_context // 2  # so that long chunks have a long context too
        chunks = _upto([16, 64, 128, 256, 512, half, *_doubling(1024)], limits.max_context)
        contexts = [0, *_upto([128, 512, half, *_doubling(1024)], limits.max_context)]
        grid = [(n, c) for n in chunks for c in contexts]
        return [key for key in grid if allowed(op, key, limits)]
    if OPS[op].family == "decode":
        batches = _upto([1, 2, 4, 8, 16, *_doubling(32)], limits.max_batch)
        contexts = _upto([16, 128, 512, *_doubling(1024)], limits.max_context - 1)
        return [(batch, context) for batch in batches for context in contexts]
    # The first sizes one by one: small matrices take anything but monotone times on a CPU.
    sizes = [*range(1, 9), 12, 16, 24, 32, 48, 64, 96]
    edges = [k * TILE for k in range(1, 17)] + _doubling(32 * TILE)
    return [
        (m,) for m in _upto(sizes + edges + [edge + 1 for edge in edges], _most_rows(op, limits))
    ]


def allowed(op: str, key: Key, limits: Limits) -> bool:
    """Whether the point lies within the limits."""
    family = OPS[op].family
    if family == "prefill":
        return sum(key) <= limits.max_context
    if family == "decode":
        return key[0] <= limits.max_batch and key[1] < limits.max_context
    return key[0] <= _most_rows(op, limits)


def _most_rows(op: str, limits: Limits) -> int:
    return limits.max_batch if OPS[op].outputs else limits.max_tokens


def _doubling(first: int) -> list[int]:
    return [first * 2**i for i in range(12)]


def _upto(sizes: list[int], most: int) -> list[int]:
    return sorted({size for size in sizes if size < most} | {most})


def make_grid(
    op: str, coarse: dict[Key, float], target: float, limits: Limits, resolution: float
) -> Grid:
    """The adaptive grid of one op over its measured coarse points."""
    family = OPS[op].family
    if family == "prefill":
        return Surface(coarse, target, _prefill_terms, lambda key: allowed(op, key, limits))
    if family == "decode":
        return Surface(coarse, target, _decode_terms, lambda key: allowed(op, key, limits))
    return SizeGrid(coarse, target, resolution)


def _prefill_terms(chunk: Floats, context: Floats) -> Floats:
    """Launch; rows; KV read and written; query-key pairs under the causal mask, and without."""
    pairs = chunk * (context + (chunk + 1) / 2)
    full = chunk * (context + chunk)
    return np.stack([np.ones_like(chunk), chunk, chunk + context, pairs, full], axis=-1)


def _decode_terms(batch: Floats, context: Floats) -> Floats:
    """Launch; sequences; one sequence's KV; the whole batch's KV."""
    return np.stack([np.ones_like(batch), batch, context, batch * context], axis=-1)


#: Journal and table name of each.
DESIGNED = SKEWED, MIXED = "attn_decode_skew", "mixed"


def designed_points(op: str, limits: Limits) -> list[Key]:
    """The points of one of DESIGNED, ascending, all within the limits."""
    return sorted(set(_mixed(limits) if op == MIXED else _skewed(limits)))


def _mixed(limits: Limits) -> list[Key]:
    """Keys (chunk, context, batch, decode context); a chunk and its decodes fill a tile.

    Half of all combinations, each level of one size with each of any other; and the layers of the
    chunks alone and of the decodes alone, which separate an interaction from a layer that is not
    the sum of its ops.
    """
    most = limits.max_context
    totals = _powers(64, 2, min(limits.max_tokens, most // 2) // 2)
    contexts = (0, most // 2)
    batches = [n for n in _powers(2, 4, limits.max_batch) if n < totals[-1]]
    held = [max(1, most // 16), most // 2]
    found: list[Key] = []
    for levels in product(*(range(len(sizes)) for sizes in (totals, contexts, batches, held))):
        total, context = totals[levels[0]], contexts[levels[1]]
        batch, decode_context = batches[levels[2]], held[levels[3]]
        if sum(levels) % 2 == 0 and total > batch:
            found.append((total - batch, context, batch, decode_context))
    alone = [(total, context, 0, 0) for total in totals for context in contexts]
    return found + alone + [(0, 0, batch, context) for batch in batches for context in held]


def _skewed(limits: Limits) -> list[Key]:
    """Keys (batch, mean context, longest): moderate, strong, and one that has nearly all."""
    most = limits.max_context - 1
    found: list[Key] = []
    for batch in _powers(4, 4, limits.max_batch):
        for mean in sorted({max(4, limits.max_context // 16), max(4, limits.max_context // 4)}):
            longest = (3 * mean // 2, 3 * mean, 9 * batch * mean // 10)
            possible = min(most, batch * mean)
            found += [(batch, mean, size) for size in longest if mean < size <= possible]
    return found


def _powers(first: int, factor: int, most: int) -> list[int]:
    """``first``, ``first * factor``, ... below ``most``, and ``most`` itself (at least 1)."""
    sizes = [first * factor**i for i in range(12)]
    return sorted({size for size in sizes if size < most} | {max(1, most)})


def skewed_contexts(batch: int, mean: int, longest: int) -> list[int]:
    """Contexts that fall geometrically from ``longest`` and add up to ``batch * mean``.

    The nearer ``longest`` is to the sum, the more it becomes one long sequence and many short ones.
    Raises ValueError where no such contexts exist.
    """
    if not mean <= longest <= batch * mean:
        raise ValueError(f"no {batch} contexts have the mean {mean} and the maximum {longest}")
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        total = sum(longest * ratio**i for i in range(batch))
        low, high = (ratio, high) if total < batch * mean else (low, ratio)
    # Rounding the running sum keeps the total, and moves each context by less than one.
    sums = [round(value) for value in accumulate(longest * high**i for i in range(batch))]
    return [sums[0], *(after - before for before, after in pairwise(sums))]
