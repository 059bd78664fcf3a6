"""The steps that look at the machine: what it is, whether attention is right, what it gives at
most, and how to time on it. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isfinite
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sarathi_sim.profiler.facts.device import DeviceSpec, load_device, shipped_device
from sarathi_sim.profiler.facts.roofline import HBM_SHARE
from sarathi_sim.profiler.first_light.steps import Found, Task
from sarathi_sim.profiler.planning.journal import ProfileError
from sarathi_sim.profiler.planning.settings import AttentionChoice, FlushMode
from sarathi_sim.profiler.shard import environment as machine
from sarathi_sim.profiler.shard.attention import (
    Attention,
    KVCache,
    choose_attention,
    sdpa_reasons,
)
from sarathi_sim.profiler.shard.rows import Chunk, Decodes
from sarathi_sim.profiler.shard.timing import (
    Sampler,
    Timer,
    best_flush,
    no_garbage_collection,
    reason,
)

#: Query heads, KV heads and head dimension of Llama 13B and Llama 3 8B.
SHAPES = {"MHA": (40, 40, 128), "GQA": (32, 8, 128)}


#: Whose tables a rehearsal without a GPU takes.
_STAND_IN = "h100-80g-sxm"


def open_machine(task: Task) -> tuple[torch.device, torch.dtype]:
    """The GPU in bf16; in a rehearsal without one the CPU in fp32. Raises ProfileError."""
    if task.rehearsal and not torch.cuda.is_available():
        return machine.open_device("cpu", "float32", 1)
    return machine.open_device("cuda", "bfloat16", 1)


def data_sheet(kind: str) -> DeviceSpec | None:
    """The shipped device that this GPU is, or None; on a CPU, where it is a rehearsal, another."""
    return (
        shipped_device("", torch.cuda.get_device_name())
        if kind == "cuda"
        else load_device(_STAND_IN)
    )


def usable_attention(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str, Attention | str]]:
    """Each attention on each of SHAPES: its choice, the shape, and the attention or why it does not
    run. FlashAttention 3 comes last: it stays in SDPA once it is loaded."""
    for wanted in get_args(AttentionChoice)[1:]:
        for what, shape in SHAPES.items():
            try:
                yield wanted, what, choose_attention(device, dtype, *shape, wanted)[0]
            except ValueError as error:
                yield wanted, what, str(error)


def probe(task: Task) -> Found:
    """Versions, memory, clocks; the kernels of SDPA and the attentions that run.

    Raises ProfileError where torch sees no GPU.
    """
    device, dtype = open_machine(task)
    kind = device.type
    known: dict[str, Any] = dict(machine.facts(kind, 1)) | Sampler().facts
    known["gpu"] = known.get("gpu", known["processor"])
    known["memory_bytes"], known["free_bytes"] = machine.memory_bytes(kind)
    known["num_sms"] = machine.num_sms(kind, 1)
    known["sdpa_kernels"] = {
        backend.name.lower(): _sdpa_refusal(backend, device, dtype)
        for backend in (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.MATH,
        )
    }
    refused: dict[str, str] = {}
    names: set[str] = set()
    for wanted, what, attention in usable_attention(device, dtype):
        if isinstance(attention, str):
            refused[f"{wanted}, {what}"] = attention
        else:
            names.add(f"{attention.name}, {what}")
    known["attention"], known["no_attention"] = sorted(names), refused
    for why in refused.values():
        print(f"not usable: {why}")  # noqa: T201
    headline = f"{known['gpu']}, torch {known['torch']}"
    headline += "" if "driver" in known else "; no NVML"
    headline += f"; no {', no '.join(refused)}" if refused else ""
    return Found(headline, known)


def _sdpa_refusal(backend: SDPBackend, device: torch.device, dtype: torch.dtype) -> str:
    """Why SDPA does not take this kernel for a causal prompt with GQA; empty if it does."""
    heads, kv_heads, dim = SHAPES["GQA"]
    q = torch.zeros(1, heads, 64, dim, device=device, dtype=dtype)
    k = torch.zeros(1, kv_heads, 64, dim, device=device, dtype=dtype)
    try:
        with sdpa_reasons() as why, sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError) as error:
        return " ".join(" ".join([str(error), *why]).split())[:200]
    return ""


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
    """Differences of one attention from float64, by case, over the allowed ones."""

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
        """Note the largest difference over the rounding error; NaN counts as infinite."""
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


_SIDE, _TINY_SIDE = 8192, 64
_OFF = 0.1


def ceilings(task: Task) -> Found:
    """Bytes a second of one copy, and FLOP/s of a product of 8192 x 8192 matrices (random, bf16).

    Beside the data sheet. Usual is HBM_SHARE of its bandwidth, and the rate of this product in the
    kernel tables of this GPU. Raises ProfileError for less than 0.9 of that, and for more than the
    data sheet's number, which no GPU can give.
    """
    device, dtype = open_machine(task)
    timer = Timer(device)
    side = _TINY_SIDE if task.rehearsal else _SIDE
    with no_garbage_collection():
        free = 64 * 2**20 if task.rehearsal else machine.memory_bytes(device.type)[1]
        copied = machine.copy_bandwidth(device, timer, free)
        flops = 2 * side**3 / _product_s(timer, side, device, dtype)
    facts: dict[str, object] = {"copy_bytes_per_s": copied, "product_flops": flops, "side": side}
    headline = f"copy {copied / 1e12:.3g} TB/s, product {flops / 1e12:.3g} TFLOP/s"
    spec = data_sheet(device.type)
    if spec is None:
        return Found(f"{headline}; no data sheet of this GPU here, so nothing to hold it to", facts)
    usual = {"copy": HBM_SHARE * spec.memory_bandwidth, "product": usual_product(spec)}
    shares = {"copy": copied / spec.memory_bandwidth, "product": flops / spec.peak_flops}
    facts |= {"device": spec.name, "usual": usual, "share_of_data_sheet": shares}
    headline += f": {shares['copy']:.0%} and {shares['product']:.0%} of the data sheet"
    found = {"copy": copied, "product": flops}
    if not task.rehearsal:
        most = {"copy": spec.memory_bandwidth, "product": spec.peak_flops}
        if wrong := off_ceiling(found, usual, most):
            raise ProfileError(f"{headline}; {wrong}")
    return Found(headline, facts)


def off_ceiling(found: dict[str, float], usual: dict[str, float], most: dict[str, float]) -> str:
    """The problems of these rates; empty if there are none."""
    wrong = []
    for what, rate in found.items():
        if rate < (1 - _OFF) * usual[what]:
            wrong.append(
                f"the {what} is {1 - rate / usual[what]:.0%} below what this GPU usually gives: is "
                "it shared, hot or held back (nvidia-smi -q -d PERFORMANCE)?"
            )
        if rate > most[what]:
            wrong.append(f"the {what} is above the data sheet: the timing is wrong")
    return "; ".join(wrong)


def usual_product(spec: DeviceSpec) -> float:
    """FLOP/s of the product by the kernel tables of the device: the median of its stacks."""
    import numpy as np

    from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
    from sarathi_sim.profiler.kernels.stack_file import load_stack, stacks_on, stored

    tables = (
        stored(load_stack(spec.name, stack)[1], "gemm.bf16") for stack in stacks_on(spec.name)
    )
    times = [
        GemmLattice.from_arrays(table).time_us(np.array([float(_SIDE)]), _SIDE, _SIDE)[0]
        for table in tables
    ]
    return float(2e6 * _SIDE**3 / np.median(times)) if times else 0.0


def _product_s(timer: Timer, side: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.empty(side, side, device=device, dtype=dtype).normal_() for _ in range(2))
    timing = timer(lambda _: a @ b)
    assert timing.time_us is not None
    return timing.time_us * 1e-6


_COPIES, _CHOSEN_AT = 4, 16


def methods(task: Task) -> Found:
    """Microseconds of a product of m x n x n by each way and m, and of an empty pair of events.

    The weights rotate over four copies. The bytes of the weights over the time are a way's
    bandwidth: ``flush``, the way that the profiles take, is chosen by that at m of 16 and the copy
    bandwidth of the step before (:func:`sarathi_sim.profiler.shard.timing.best_flush`).
    """
    device, dtype = open_machine(task)
    n = 64 if task.rehearsal else 5120
    weights = [torch.empty(n, n, device=device, dtype=dtype).normal_() for _ in range(_COPIES)]
    moved = n * n * weights[0].element_size()
    times: dict[str, dict[int, float]] = {}
    floors: dict[str, float] = {}
    rates: dict[FlushMode, float] = {}
    for mode in get_args(FlushMode):
        timer = Timer(device, repeats=2 if task.rehearsal else 20, flush=mode)
        times[mode] = {}
        with no_garbage_collection():
            floors[mode] = timer.event_floor().time_us or 0.0
            for m in (1, _CHOSEN_AT, 512):
                x = torch.empty(m, n, device=device, dtype=dtype).normal_()
                timing = timer(lambda i, x=x: F.linear(x, weights[i % _COPIES]))  # type: ignore[misc]
                times[mode][m] = timing.time_us or 0.0
        rates[mode] = moved / (1e-6 * times[mode][_CHOSEN_AT])
    ceiling = task.facts("ceilings").get("copy_bytes_per_s", float("inf"))
    chosen = best_flush(rates, ceiling)
    text = ", ".join(f"{mode} {each[_CHOSEN_AT]:.3g} us" for mode, each in times.items())
    facts = {"flush": chosen, "time_us": times, "event_floor_us": floors, "bytes_per_s": rates}
    return Found(f"{_CHOSEN_AT} tokens: {text}; taken: {chosen}", facts)
