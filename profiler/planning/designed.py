"""Points chosen beforehand: whole layers of mixed batches, and decodes of unequal contexts.

The terms fitted to them have one to four parameters, so the points span the sizes rather than fill
them. No torch.
"""

from __future__ import annotations

from itertools import accumulate, pairwise, product

from sarathi_sim.profiler.planning.grid import Key
from sarathi_sim.profiler.planning.settings import Limits

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
