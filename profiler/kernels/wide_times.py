"""Experts that more ranks share than a node has, and the exchange of tokens among those ranks.

Experts are timed by the tokens of all ranks, an exchange by those of one GPU. DeepEP has two modes:
low latency, whose experts are masked GEMMs, and normal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.formats import MOE_BYTES, Kernels, MoeDtype
from sarathi_sim.profiler.facts.roofline import HALF, Array
from sarathi_sim.profiler.kernels.exchange_curves import Exchange, ExchangeCurves
from sarathi_sim.profiler.kernels.moe_surface import MoeSurface, rates_of
from sarathi_sim.profiler.kernels.reduce_curves import ReduceCurve
from sarathi_sim.profiler.kernels.stack_file import KernelFit, load_stack, stored
from sarathi_sim.profiler.public.kernel_tables import MOST_RANKS

#: The family of these tables.
WIDE = "wide"
#: DeepEP's modes. Low latency serves up to so many tokens of a GPU: the largest measured ones, and
#: the buffers of published recipes (SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK).
MODES = ("low_latency", "normal")
LOW_LATENCY_TOKENS = 1024
#: The kernels of TensorRT-LLM's exchanges over NVLink.
PARTS = {
    "nvlink_one_sided": ("dispatch", "combine"),
    "nvlink_two_sided": ("prepare", "dispatch", "combine"),
}
#: Without an exchange: the rows of all ranks are gathered, and the sums of outputs scattered.
GATHERS = ("all_gather", "reduce_scatter")
#: Half-widths in percent, assumed: exchanges whose tokens spread evenly here; and laws without a
#: table of their own.
_EVEN_PCT, _LAW_PCT = 25.0, 50.0
#: Whose DeepEP between nodes counts where none was measured.
_NODES_OF = "h200-sxm"


@dataclass(frozen=True)
class WideAnswer:
    """An op's microseconds by tokens, their origin, and the half-width of their band in percent."""

    time_us: Callable[[Array], Array]
    mark: str
    half_width_pct: float


Shape = tuple[int, ...]


def wide_experts(chip: str, kernels: Kernels, shape: Shape) -> WideAnswer | None:
    """The experts of one GPU by the tokens of all ranks; None where the stack's tables of experts
    (:mod:`sarathi_sim.profiler.kernels.own_ops`) are the ones to ask.

    ``shape`` is :data:`~sarathi_sim.profiler.kernels.moe_surface.SHAPE`, with a slot for each copy
    among the experts. DeepEP's experts were timed in fp8 in blocks: other formats reach as large
    a share of their own rates (assumed). Raises SpecError where DeepEP's were not measured.
    """
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
    how = " and ".join(dict.fromkeys(_FROM[kind] for kind in kinds))
    mark = (
        f"{origin}: {timed} experts of {spec.stack} {fits[0].version}, {' and '.join(names)}, ep "
        f"{shape[5]}, {how}" + (f"; {dtype} by the rates of both formats" if law else "")
    )

    def time_us(tokens: Array) -> Array:
        first, *rest = (table.time_us(tokens, shape, rates) for table in tables)
        return np.where(tokens <= LOW_LATENCY_TOKENS * shape[5], first, rest[0]) if rest else first

    return WideAnswer(time_us, mark, max(*widths, _LAW_PCT if law else 0.0))


_FROM = {
    "between": "between token counts",
    "ranks": "between numbers of ranks",
    "shapes": "between the shapes of other models",
    "beyond": "from models that choose another number of experts",
}


def _kind(table: MoeSurface, shape: Shape) -> str:
    """The kind of hold-out that judges a shape."""
    kind, mine = table.from_what(shape), (table.shapes[:, :4] == shape[:4]).all(axis=1)
    ranks = table.shapes[mine, 5]
    inner = len(ranks) > 0 and ranks.min() < shape[5] < ranks.max()
    return "ranks" if kind != "between" and inner else kind


def exchange(device: DeviceSpec, kernels: Kernels, shape: Exchange) -> WideAnswer:
    """Sending the tokens of one GPU to the experts, and back, by their number.

    Raises SpecError where the kernels of ``moe_a2a_backend`` were not measured.
    """
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
    """DeepEP within a node (or a rack of NVLink), or between nodes: of a GPU without such a table
    by those of H200s, as their network adapters are to its own."""
    node, chip = device.gpus_per_node, device.same_chip or device.name
    own, scale, lent = load_stack(chip, "sglang"), 1.0, ""
    nodes = shape[3] > node and device.inter_node.bandwidth < device.intra_node.bandwidth
    names = [f"{mode}.nodes" if nodes else mode for mode in MODES]
    if nodes and f"{WIDE}.{names[0]}" not in own[0].kernels:
        own, lent = load_stack(_NODES_OF, "sglang"), f" from {_NODES_OF} by the links' bandwidths"
        scale = load_device(_NODES_OF).inter_node.bandwidth / device.inter_node.bandwidth
    spec, arrays = own
    for name in names:
        spec.need(WIDE, name, "moe_a2a_backend")
    low, normal = (ExchangeCurves.from_arrays(stored(arrays, f"{WIDE}.{name}")) for name in names)

    def time_us(tokens: Array) -> Array:
        few = tokens <= LOW_LATENCY_TOKENS
        each = (curves.time_us(tokens, shape, scale) for curves in (low, normal))
        return np.where(few, *each)

    fits = [spec.kernels[f"{WIDE}.{name}"] for name in names]
    kinds = ["" if lent else curves.measured(shape) for curves in (low, normal)]
    return WideAnswer(time_us, *_origin(f"DeepEP of {spec.stack}{lent}", fits, kinds, shape))


def _origin(
    name: str, fits: list[KernelFit], kinds: list[str], shape: Exchange
) -> tuple[str, float]:
    """The mark of an exchange, and its half-width."""
    by_law = "" in kinds
    widths = [
        fit.half_width_pct(kind, _LAW_PCT) for fit, kind in zip(fits, kinds, strict=True) if kind
    ]
    width = max(*widths, _LAW_PCT if by_law else _EVEN_PCT, 0.0)
    kind = "derived" if by_law else "measured" if set(kinds) == {"sizes"} else "interpolated"
    how = "; by the bytes to other ranks" if by_law else ""
    even = "tokens spread evenly over ranks (assumed)"
    return f"{kind}: {name} {fits[0].version}, {shape[3]} ranks{how}; {even}", width


def _gathered(device: DeviceSpec, kernels: Kernels, shape: Exchange) -> WideAnswer:
    """All-gather and reduce-scatter in bf16 by NCCL (engines quantise to nvfp4 before they gather).
    With more ranks than were measured, as many bytes to others; between nodes by the links'
    bandwidths."""
    hidden, *_, ranks = shape
    spec, arrays = load_stack(device.same_chip or device.name, kernels.named)
    gpus = [int(n.split(".")[1]) for n in spec.having(WIDE) if n.startswith(GATHERS[0])]
    most = max(gpus, default=device.gpus_per_node)
    spec.need(WIDE, f"{GATHERS[0]}.{most}", "moe_a2a_backend none: all-gathers")
    within = ranks <= device.gpus_per_node
    link = device.intra_node if within else device.inter_node
    tables = [f"{WIDE}.{op}.{ranks}" for op in GATHERS]
    own, scale = tables[0] in spec.kernels, 1.0
    if not own:
        tables = [f"{WIDE}.{op}.{most}" for op in GATHERS]
        scale = (1 - 1 / ranks) / (1 - 1 / most) * device.intra_node.bandwidth / link.bandwidth
    curves = [ReduceCurve.from_arrays(stored(arrays, table)) for table in tables]
    dtype: MoeDtype = "nvfp4" if kernels.experts_in == "nvfp4" else "bf16"
    gathered = MOE_BYTES[dtype]

    def time_us(tokens: Array) -> Array:
        numbers = scale * tokens * ranks * hidden
        return curves[0].time_us(gathered * numbers) + curves[1].time_us(HALF * numbers)

    fit = spec.kernels[tables[0]]
    width = max(fit.half_width_pct("sizes", _LAW_PCT), _EVEN_PCT if own else _LAW_PCT)
    kind = "measured" if own else f"derived: from {most} GPUs by bytes"
    what = f"NCCL {fit.version} all-gather in {dtype} (assumed) and reduce-scatter, {ranks} ranks"
    return WideAnswer(time_us, f"{kind}: {what}", width)
