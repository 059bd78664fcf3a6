"""Attention beside float64: every backend, MHA and GQA, chunks, a CUDA graph. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from sarathi_sim.profiler.first_light.probe_machine import SHAPES, open_machine, usable_attention
from sarathi_sim.profiler.first_light.steps import Found, Task
from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.shard.attention import Attention, KVCache
from sarathi_sim.profiler.shard.failures import reason
from sarathi_sim.profiler.shard.rows import Chunk, Decodes

_PROMPT, _CHUNK = 192, 64
_CONTEXTS = (77, 5, 30, 0)
_SLOTS = 400


def reference(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention in float64: q (n, heads, dim) are the last n of keys' (tokens, kv_heads,
    dim)."""
    new, heads, dim = q.shape
    share = heads // keys.shape[1]
    q, k, v = (part.double().transpose(0, 1) for part in (q, keys, values))
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = q @ k.transpose(1, 2) / dim**0.5
    hidden = torch.ones(new, k.shape[1], dtype=torch.bool, device=q.device)
    hidden = hidden.triu(k.shape[1] - new + 1)
    out: Tensor = scores.masked_fill(hidden, -inf).softmax(-1) @ v
    return out.transpose(0, 1)


def rounding(dtype: torch.dtype, terms: int) -> float:
    """How far a right result may be off, over the largest absolute value in V.

    The probabilities, and the output, are each rounded to ``dtype``, twice at most; sums of
    ``terms`` are in float32.
    """
    return 4 * torch.finfo(dtype).eps + terms * torch.finfo(torch.float32).eps


class _Checks:
    """Differences of one attention from float64, by what was computed, over what is allowed."""

    def __init__(
        self, attention: Attention, shape: tuple[int, int, int], dev: torch.device, dt: torch.dtype
    ) -> None:
        self.attention, self.shape, self.dtype = attention, shape, dt
        heads, kv_heads, dim = shape
        self.cache = KVCache(_SLOTS, kv_heads, dim, dev, dt)
        self._heads = (heads, kv_heads, kv_heads)
        self._device = dev
        self.found: dict[str, float] = {}

    def new(self, tokens: int) -> tuple[Tensor, ...]:
        """q, k and v of new tokens."""
        dim = self.shape[2]
        sizes = ((tokens, heads, dim) for heads in self._heads)
        return tuple(torch.empty(s, device=self._device, dtype=self.dtype).normal_() for s in sizes)

    def differ(self, what: str, out: Tensor, expected: Tensor, terms: int) -> None:
        """Note the largest difference over what rounding allows; NaN counts as infinite."""
        allowed = rounding(self.dtype, terms) * self.cache.v.abs().max().double()
        off = float(((out.double() - expected).abs().max() / allowed).item())
        self.found[what] = round(off, 4) if isfinite(off) else inf

    def run(self) -> None:
        """A prompt whole, in chunks, decodes of equal and of unequal lengths, and in a graph."""
        q, k, v = new = self.new(_PROMPT)
        terms = _PROMPT + self.shape[2]
        whole = Chunk(self.attention, _PROMPT, 0).run(self.cache, *new).clone()
        expected = reference(q, k, v)
        self.differ("prompt", whole, expected, terms)
        parts = []
        for start in range(0, _PROMPT, _CHUNK):
            part = tuple(each[start : start + _CHUNK] for each in new)
            parts.append(Chunk(self.attention, _CHUNK, start).run(self.cache, *part).clone())
        self.differ("chunks", torch.cat(parts), expected, terms)
        self.decodes("equal", [_CONTEXTS[0]] * len(_CONTEXTS))
        self.decodes("unequal", _CONTEXTS)

    def decodes(self, what: str, contexts: Sequence[int]) -> None:
        """One token for each sequence, eagerly and captured."""
        cache, new, stride = self.cache, self.new(len(contexts)), max(contexts) + 1
        decodes = Decodes.in_a_row(self.attention, contexts, self._device)

        def step() -> Tensor:
            return decodes.run(cache, *new)

        out, rows = step().clone(), []
        for row, context in enumerate(contexts):
            end = row * stride + context + 1
            held = slice(row * stride, end)
            rows.append(reference(new[0][row : row + 1], cache.k[held], cache.v[held]))
        expected = torch.cat(rows)
        terms = max(contexts) + self.shape[2]
        self.differ(f"decodes, {what}", out, expected, terms)
        if self._device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            graph.replay()
            torch.cuda.synchronize()
            self.differ(f"decodes, {what}, CUDA graph", out, expected, terms)


def correctness(task: Task) -> Found:
    """Every attention that runs here, on both SHAPES. Raises ProfileError where one is wrong."""
    device, dtype = open_machine(task)
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for wanted, what, attention in usable_attention(device, dtype):
        if isinstance(attention, str):
            continue
        checks = _Checks(attention, SHAPES[what], device, dtype)
        with torch.inference_mode():
            try:
                checks.run()
            except (RuntimeError, NotImplementedError, ValueError) as error:
                failed[f"{wanted}, {what}"] = reason(error)
        found[f"{wanted}, {what}"] = checks.found
    print(found, failed)  # noqa: T201
    worst = max((off for each in found.values() for off in each.values()), default=inf)
    wrong = [
        f"{name}: {what} is {off:.3g} times as far from float64 as rounding allows"
        for name, each in found.items()
        for what, off in each.items()
        if not off <= 1
    ]
    if wrong or len(failed) == len(found):
        problems = [*wrong, *(f"{name}: {why}" for name, why in failed.items())]
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ProfileError("; ".join(problems[:3]) + more)
    headline = f"{len(found)} kernels within {worst:.2f} of what rounding allows"
    if failed:
        headline += f"; FAILED: {', '.join(failed)}"
    return Found(headline, {"over_tolerance": found, "failed": failed})
