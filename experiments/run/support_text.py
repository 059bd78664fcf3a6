"""The support matrix as tables, on a terminal and as docs/support.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sarathi_sim.experiments.run.support import FAMILIES, ITERATION, SEQUENCE, SHARE, Combination
from sarathi_sim.profiler.facts.formats import WEIGHT_DTYPES
from sarathi_sim.profiler.kernels.stack_file import load_stack
from sarathi_sim.profiler.physics.shard_times import KINDS

#: Kinds of op times as the matrix writes them.
LETTERS = {"measured": "m", "interpolated": "i", "derived": "d", "modelled": "p"}
LEGEND = (
    f"A cell is the smallest layout that holds a sequence of {SEQUENCE:,} tokens beside the "
    f"weights, with {SHARE:.0%} of the memory and {ITERATION.tokens:,} tokens an iteration: GPUs "
    "of tensor parallelism, x pipeline stages. The letter says where GEMM and attention times come "
    "from: m: measured with this shape and these head counts; i: interpolated between measured "
    "ones; d: derived from the same chip with other memory; p: physics only, fitted to "
    "measurements. The number is the half-width in percent of the widest 90 % band of the layer's "
    "GEMMs. The stack that needs the fewest GPUs counts, then the most direct. -: refused."
)

Rows = list[tuple[str, ...]]
Table = tuple[tuple[str, ...], Rows]
"""Headings and rows."""


def matrix(found: Sequence[Combination], dtype: str) -> Table:
    """Models by devices in one number format of the weights."""
    devices = list(dict.fromkeys(cell.device.name for cell in found))
    best: dict[tuple[str, str], Combination] = {}
    for cell in found:
        key = cell.model.name, cell.device.name
        if cell.dtype == dtype and cell.memory is not None:
            best[key] = min(best.get(key, cell), cell, key=_rank)
    used = [name for name in devices if any(key[1] == name for key in best)]
    models = dict.fromkeys(cell.model.name for cell in found)
    rows: Rows = [(m, *(_short(best.get((m, d))) for d in used)) for m in models]
    return ("model", *used), rows


def _rank(cell: Combination) -> tuple[int, int, float]:
    assert cell.memory is not None
    tp, pp = cell.memory[0]
    return tp * pp, KINDS.index(cell.kind), cell.off_pct["GEMM"]


def _short(cell: Combination | None) -> str:
    if cell is None or cell.memory is None:
        return "-"
    return f"{_layout(cell)}{LETTERS[cell.kind]} {cell.off_pct['GEMM']:.0f}"


def _layout(cell: Combination) -> str:
    assert cell.memory is not None
    tp, pp = cell.memory[0]
    return f"{tp}" if pp == 1 else f"{tp}x{pp}"


def by_device(found: Sequence[Combination]) -> Table:
    """What was measured on each device: stacks, versions, number formats."""
    rows: Rows = []
    for device, stack in dict.fromkeys((cell.device.name, cell.stack) for cell in found):
        mine = [c for c in found if (c.device.name, c.stack) == (device, stack)]
        dtypes = [d for d in WEIGHT_DTYPES if any(c.dtype == d and c.sources for c in mine)]
        kernels = load_stack(device, stack)[0].kernels if stack else {}
        versions = {fit.version for name, fit in kernels.items() if "nccl" not in name}
        degrees = sorted({tp for cell in mine for tp in cell.sources})
        rows.append(
            (
                device,
                stack or "(calibrated)",
                ", ".join(sorted(versions)) or "-",
                ", ".join(dtypes) or "-",
                ", ".join(map(str, degrees)) or "-",
                f"{len({c.model.name for c in mine if c.memory})}",
            )
        )
    return ("device", "kernels of", "versions", "dtypes", "TP", "models"), rows


def details(found: Iterable[Combination]) -> Table:
    """A row for every cell that runs."""
    rows: Rows = []
    for cell in found:
        if cell.memory is not None:
            off = (f"{cell.off_pct[f]:.0f}" if f in cell.off_pct else "-" for f in FAMILIES)
            where = (cell.model.name, cell.device.name, cell.stack or "(calibrated)", cell.dtype)
            degrees = ", ".join(map(str, sorted(cell.sources)))
            cache = ", ".join(cell.caches)
            rows.append((*where, cache, degrees, _layout(cell), cell.kind, *off))
    half_widths = (f"{family} ±%" for family in FAMILIES)
    about = ("model", "device", "stack", "dtype", "KV cache", "TP", "smallest", "op times")
    return (*about, *half_widths), rows


def refusals(found: Iterable[Combination]) -> Table:
    """Reasons, each with the TP degrees that it keeps out and the models that it is about."""
    models: dict[tuple[str, str], dict[str, None]] = {}
    for cell in found:
        for reason, degrees in cell.refused.items():
            key = reason, ", ".join(map(str, degrees))
            models.setdefault(key, {})[cell.model.name] = None
    rows: Rows = [(reason, tps, ", ".join(names)) for (reason, tps), names in models.items()]
    return ("refused because", "TP", "models"), rows


def page(found: Sequence[Combination]) -> str:
    """docs/support.md."""
    parts = [
        "# What runs where",
        "`sarathi-sim support --markdown > docs/support.md` makes this page, from what `run` "
        "takes op times from. `sarathi-sim support --model M --device D` has every op's origin and "
        "error, and the memory.",
        "## Devices",
        _markdown(by_device(found)),
        "## Models",
        LEGEND,
    ]
    for dtype in WEIGHT_DTYPES:
        parts += [f"### {dtype}", _markdown(matrix(found, dtype))]
    runs = {(cell.model.name, cell.device.name) for cell in found if cell.memory is not None}
    never = [
        cell
        for cell in found
        if cell.dtype == WEIGHT_DTYPES[0] and (cell.model.name, cell.device.name) not in runs
    ]
    parts += [
        "## Refused on a device with every stack",
        _markdown(refusals(never)),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    headings, rows = table
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
