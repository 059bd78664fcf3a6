"""Experts that more ranks share than a node has, and the exchange of tokens among those ranks.

Experts are timed by the tokens of all ranks, an exchange by those of one GPU. DeepEP has two modes:
low latency, whose experts are masked GEMMs, and normal. Few tokens of a GPU go in low latency, more
in normal mode (:func:`_low_latency_tokens`), which counts as no faster than the most that go in low
latency. Engines fix the mode by worker; decodes are few tokens, prompts many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..facts.device import DeviceSpec, load_device
from ..facts.formats import MOE_BYTES, Kernels, MoeDtype
from ..facts.roofline import HALF, Array
from .message_curves import Exchange, ExchangeCurves, ReduceCurve, sent_us
from .moe_surface import MoeSurface, rates_of
from .stack_file import (
    Arrays,
    KernelFit,
    StackSpec,
    load_stack,
    stored,
)

#: The family of these tables.
WIDE = "wide"
#: DeepEP's modes, and the most tokens of a GPU for which published recipes have buffers of low
#: latency (SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK).
MODES = ("low_latency", "normal")
LOW_LATENCY_TOKENS = 1024
#: The kernels of TensorRT-LLM's exchanges over NVLink.
PARTS = {
    "nvlink_one_sided": ("dispatch", "combine"),
    "nvlink_two_sided": ("prepare", "dispatch", "combine"),
}
#: The marks of surfaces of experts, by the kind of hold-out that judges a shape.
FROM = {
    "between": "between token counts",
    "ranks": "between numbers of ranks",
    "shapes": "between the shapes of other models",
    "beyond": "from models that choose another number of experts",
}
#: Ranks that divide the experts of a layer in the stack's own tables, at most.
MOST_RANKS = 16
#: Without an exchange: the rows of all ranks are gathered, and the sums of outputs scattered.
GATHERS = ("all_gather", "reduce_scatter")
#: Half-widths in percent, assumed: exchanges whose tokens spread evenly here; and laws without a
#: table of their own.
_EVEN_PCT, _LAW_PCT = 25.0, 50.0
_BY_BYTES = "by the bytes to other ranks"
#: Whose DeepEP between nodes counts where none was measured.
_NODES_OF = "h200-sxm"


@dataclass(frozen=True)
class WideAnswer:
    """An op's microseconds by tokens, their origin, and the half-width of their band in percent."""

    time_us: Callable[[Array], Array]
    mark: str
    half_width_pct: float


Shape = tuple[int, ...]


def wide_experts(device: DeviceSpec, kernels: Kernels, shape: Shape) -> WideAnswer | None:
    """The experts of one GPU by the tokens of all ranks; None where the stack's tables of experts
    (:mod:`sarathi_sim.profiler.kernels.own_ops`) are the ones to ask.

    ``shape`` is :data:`~sarathi_sim.profiler.kernels.moe_surface.SHAPE`, with a slot for each copy
    among the experts. DeepEP's experts were timed in fp8 in blocks: other formats reach as large
    a share of their own rates (assumed). Raises SpecError where DeepEP's were not measured.
    """
    chip = device.same_chip or device.name
    spread, dtype, engine = kernels.expert_distribution, kernels.experts_in, kernels.named
    names, deepep = tuple[str, ...](), kernels.moe_a2a_backend == "deepep"
    if deepep:
        spread, engine = "balanced" if kernels.redundant_experts else spread, "sglang"
        names = tuple(f"{mode}_experts.fp8_block.{spread}" for mode in MODES)
    elif kernels.redundant_experts:
        names = (f"even.{dtype}.{spread}",)
    elif kernels.dp > 1 and kernels.expert_parallel and shape[5] > MOST_RANKS:
        names = (f"experts.{dtype}.{spread}",)
    spec, arrays = load_stack(chip, engine)
    for name in names if deepep else ():
        spec.need(WIDE, name, "moe_a2a_backend deepep: experts")
    if not names or f"{WIDE}.{names[0]}" not in spec.kernels:
        return None
    fits = [spec.kernels[f"{WIDE}.{name}"] for name in names]
    tables = [MoeSurface.from_arrays(stored(arrays, f"{WIDE}.{name}")) for name in names]
    rates, timed = rates_of(chip, dtype, spread), names[0].split(".")[1]
    if names[0].startswith("even"):
        rates = rates_of(chip, dtype, "balanced")
    kinds = [_kind(table, shape) for table in tables]
    widths = [fit.half_width_pct(kind, _LAW_PCT) for fit, kind in zip(fits, kinds, strict=True)]
    law = timed != dtype
    origin = "derived" if law else fits[0].origin(set(kinds) == {"between"})
    how = " and ".join(dict.fromkeys(FROM[kind] for kind in kinds))
    mark = (
        f"{origin}: {timed} experts of {spec.stack} {fits[0].version}, {' and '.join(names)}, ep "
        f"{shape[5]}, {how}" + (f"; {dtype} by the rates of both formats" if law else "")
    )

    first, *rest = (partial(table.time_us, shape=shape, rates=rates) for table in tables)
    width = max(*widths, _LAW_PCT if law else 0.0)
    if not rest:
        return WideAnswer(first, mark, width)
    most = shape[5] * _low_latency_tokens(device, shape[5])
    time_us, gap_pct = _two_modes(first, rest[0], most)
    return WideAnswer(time_us, mark, max(width, gap_pct))


def _kind(table: MoeSurface, shape: Shape) -> str:
    """The kind of hold-out that judges a shape."""
    kind, mine = table.from_what(shape), (table.shapes[:, :4] == shape[:4]).all(axis=1)
    ranks = table.shapes[mine, 5]
    inner = len(ranks) > 0 and ranks.min() < shape[5] < ranks.max()
    return "ranks" if kind != "between" and inner else kind


def exchange(device: DeviceSpec, kernels: Kernels, shape: Exchange) -> WideAnswer:
    """Sending the tokens of one GPU to the experts, and back, by their number. Raises SpecError
    where the kernels of ``moe_a2a_backend`` were not measured."""
    backend = kernels.moe_a2a_backend
    if backend == "none":
        return _gathered(device, kernels, shape)
    if backend == "deepep":
        return _deepep(device, shape)
    spec, arrays = load_stack(device.same_chip or device.name, kernels.named)
    dtype = {"nvfp4": "nvfp4", "bf16": "bf16"}.get(kernels.experts_in, "fp8")
    total, fits, kinds = list[tuple[ExchangeCurves, float]](), list[KernelFit](), list[str]()
    for part in PARTS[backend]:
        name = f"{backend}.{part}.nvfp4"
        spec.need(WIDE, name, "moe_a2a_backend")
        scale = 1.0
        if part == "dispatch" and f"{WIDE}.{backend}.{part}.{dtype}" in spec.kernels:
            name = f"{backend}.{part}.{dtype}"
        elif part == "dispatch":
            scale = MOE_BYTES[kernels.experts_in] / MOE_BYTES["nvfp4"]
        curves = ExchangeCurves.from_arrays(stored(arrays, f"{WIDE}.{name}"))
        total.append((curves, scale))
        fits.append(spec.kernels[f"{WIDE}.{name}"])
        kinds.append("" if scale != 1 else curves.measured(shape))

    def time_us(tokens: Array) -> Array:
        return sum((c.time_us(tokens, shape, s) for c, s in total), np.zeros(np.shape(tokens)))

    return WideAnswer(time_us, *_origin(f"{backend} of {spec.stack}", fits, kinds, shape))


def _deepep(device: DeviceSpec, shape: Exchange) -> WideAnswer:
    """DeepEP's exchange; between nodes by another chip's tables, as its network adapters are to
    those of ``device``."""
    spec, arrays, names = _deepep_tables(device, shape[3])
    for name in names:
        spec.need(WIDE, name, "moe_a2a_backend")
    tables = [ExchangeCurves.from_arrays(stored(arrays, f"{WIDE}.{name}")) for name in names]
    scale, lent = 1.0, spec.device != (device.same_chip or device.name)
    if lent:
        scale = load_device(spec.device).inter_node.bandwidth / device.inter_node.bandwidth
    low, normal = (partial(curves.time_us, shape=shape, scale=scale) for curves in tables)
    most = _low_latency_tokens(device, shape[3])
    time_us, gap_pct = _two_modes(low, normal, most)
    fits = [spec.kernels[f"{WIDE}.{name}"] for name in names]
    kinds = ["" if lent else curves.measured(shape) for curves in tables]
    law = f"from {spec.device} by the links' bandwidths" if lent else _BY_BYTES
    mark, width = _origin(f"DeepEP of {spec.stack}", fits, kinds, shape, law)
    mark += f"; low latency up to {most:g} tokens of a GPU"
    return WideAnswer(time_us, mark, max(width, gap_pct))


def _apart(device: DeviceSpec, ranks: int) -> bool:
    """Whether these ranks are on several nodes, and not in a rack of NVLink."""
    slower = device.inter_node.bandwidth < device.intra_node.bandwidth
    return ranks > device.gpus_per_node and slower


def _deepep_tables(device: DeviceSpec, ranks: int) -> tuple[StackSpec, Arrays, list[str]]:
    """The tables of DeepEP's modes among these ranks, of the chip or of the one that lends."""
    names = [f"{mode}.nodes" if _apart(device, ranks) else mode for mode in MODES]
    own = load_stack(device.same_chip or device.name, "sglang")
    lent = _apart(device, ranks) and f"{WIDE}.{names[0]}" not in own[0].kernels
    return *(load_stack(_NODES_OF, "sglang") if lent else own), names


def _low_latency_tokens(device: DeviceSpec, ranks: int) -> float:
    """The most tokens of a GPU that go in low latency: as many as recipes have buffers for, and as
    were measured. Buffers within a node are as large as between nodes, which were measured up to
    256 on Hopper."""
    spec, arrays, _ = _deepep_tables(device, ranks)
    tables = [f"{WIDE}.{MODES[0]}", f"{WIDE}.{MODES[0]}.nodes"]
    known = [stored(arrays, table) for table in tables if table in spec.kernels]
    ends = [float(ExchangeCurves.from_arrays(table).tokens[-1]) for table in known]
    return min(LOW_LATENCY_TOKENS, *ends)


def _two_modes(
    low: Callable[[Array], Array], normal: Callable[[Array], Array], most: float
) -> tuple[Callable[[Array], Array], float]:
    """Microseconds in low latency for up to ``most`` tokens and in normal mode for more, which take
    no less; and by how many percent normal mode was measured to be faster there."""

    def time_us(tokens: Array) -> Array:
        few = low(np.minimum(tokens, most))
        return np.where(tokens <= most, few, np.maximum(few, normal(tokens)))

    end = np.array([most])
    return time_us, max(0.0, 100 * float(low(end)[0] / normal(end)[0] - 1))


def _origin(
    name: str, fits: list[KernelFit], kinds: list[str], shape: Exchange, law: str = _BY_BYTES
) -> tuple[str, float]:
    """The mark of an exchange, and its half-width. ``law`` says what follows where a kind is
    empty."""
    by_law = "" in kinds
    widths = [
        fit.half_width_pct(kind, _LAW_PCT) for fit, kind in zip(fits, kinds, strict=True) if kind
    ]
    width = max(*widths, _LAW_PCT if by_law else _EVEN_PCT, 0.0)
    kind = "derived" if by_law else "measured" if set(kinds) == {"sizes"} else "interpolated"
    how = f"; {law}" if by_law else ""
    even = "tokens spread evenly over ranks (assumed)"
    return f"{kind}: {name} {fits[0].version}, {shape[3]} ranks{how}; {even}", width


def _gathered(device: DeviceSpec, kernels: Kernels, shape: Exchange) -> WideAnswer:
    """All-gather and reduce-scatter in bf16 by NCCL (engines quantise to nvfp4 before they gather).
    With more ranks of a node than were measured, as many bytes to others. Between nodes each GPU
    first exchanges its own rows with its peer in each other node."""
    hidden, *_, ranks = shape
    spec, arrays = load_stack(device.same_chip or device.name, kernels.named)
    gpus = [int(n.split(".")[1]) for n in spec.having(WIDE) if n.startswith(GATHERS[0])]
    most = max(gpus, default=device.gpus_per_node)
    spec.need(WIDE, f"{GATHERS[0]}.{most}", "moe_a2a_backend none: all-gathers")
    apart, link = _apart(device, ranks), device.inter_node
    inside = device.gpus_per_node if apart else ranks
    others = math.ceil(ranks / inside) - 1
    timed = inside if inside in gpus else most
    scale = (1 - 1 / inside) / (1 - 1 / timed)
    tables = [f"{WIDE}.{op}.{timed}" for op in GATHERS]
    curves = [ReduceCurve.from_arrays(stored(arrays, table)) for table in tables]
    dtype: MoeDtype = "nvfp4" if kernels.experts_in == "nvfp4" else "bf16"

    def time_us(tokens: Array) -> Array:
        own = [size * tokens * hidden for size in (MOE_BYTES[dtype], HALF)]
        within = [c.time_us(scale * ranks * part) for c, part in zip(curves, own, strict=True)]
        return np.asarray(sum(within) + others * sum(sent_us(part, link) for part in own))

    fit, law = spec.kernels[tables[0]], apart or timed != inside
    width = max(fit.half_width_pct("sizes", _LAW_PCT), _LAW_PCT if law else _EVEN_PCT)
    kind = f"derived: from {timed} GPUs by bytes" if law else "measured"
    kind += f", and messages over {link.kind}" if apart else ""
    what = f"NCCL {fit.version} all-gather in {dtype} (assumed) and reduce-scatter, {ranks} ranks"
    return WideAnswer(time_us, f"{kind}: {what}", width)
