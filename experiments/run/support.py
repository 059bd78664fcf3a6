"""Which models run on which devices, by stack and number format, with the error of their op times.

Op times come from :func:`op_source`, as for ``run``, layouts from the engine's memory formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.profiler.facts.device import DeviceSpec, engine_facts, list_devices, load_device
from sarathi_sim.profiler.facts.formats import (
    KV_DTYPES,
    STACKS,
    TWO_BYTES,
    WEIGHT_DTYPES,
    Kernels,
    Stack,
    WeightDtype,
)
from sarathi_sim.profiler.facts.model import ModelSpec, list_models, load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ALL_ROW_OPS, ATTENTION, MOE, OPS, SENDS
from sarathi_sim.profiler.kernels.op_source import op_source, served_formats
from sarathi_sim.profiler.kernels.stack_file import load_stack, stacks_on, versions_on
from sarathi_sim.profiler.physics.shard_times import KINDS, DeviceTimes, Provenance, ShardTimes
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean, parse
from sarathi_sim.simulator.load.engine_memory import (
    STACK_SHARES,
    CapacityError,
    EngineMemory,
    Step,
    engine_memory,
    stage_layers,
)
from ..report.section import Section, Table

#: A layout must hold a sequence of so many tokens, in iterations of this size.
SEQUENCE, ITERATION, SHARE, BLOCK = 8192, Step(tokens=2048, sequences=256), 0.9, 16
_MOST_STAGES = 16
FAMILIES = {
    "GEMM": tuple(op for op in ALL_ROW_OPS if OPS[op].part == "layer" and OPS[op].shape),
    "experts": (MOE,),
    "attention": ATTENTION,
    "all-reduce": (ALL_REDUCE,),
}


def _kernels(
    stack: Stack | None, dtype: WeightDtype, model: ModelSpec, device: DeviceSpec
) -> Kernels | None:
    """Weights in ``dtype``, a mixture's experts in the checkpoint's format if it names one, in the
    version of the engine that its policy has by default."""
    if stack is None:
        return None
    experts = served_formats(model, device.name, stack).get("moe_dtype")
    given = {"stack": stack, "dtype": dtype, "moe_dtype": experts}
    return parse(Kernels, given | {"version": engine_facts(stack).newest}, device.name)


@dataclass(frozen=True)
class Combination:
    """A model on a device with a stack's kernels in a number format (stack None: physics).

    ``refused`` says why, and at which TP degrees.
    """

    model: ModelSpec
    device: DeviceSpec
    stack: Stack | None
    dtype: WeightDtype
    sources: dict[int, ShardTimes]
    refused: dict[str, tuple[int, ...]]

    @property
    def kernels(self) -> Kernels | None:
        """The kernels, as a configuration names them; None for physics."""
        return _kernels(self.stack, self.dtype, self.model, self.device)

    @cached_property
    def memory(self) -> tuple[tuple[int, int], EngineMemory] | None:
        """The TP and PP of the smallest layout that holds the model, and a GPU's memory there."""
        longest = max(self.sources, default=1)
        layouts = [(tp, 1) for tp in sorted(self.sources)]
        layouts += [(longest, pp) for pp in range(2, _MOST_STAGES + 1) if self.sources]
        for tp, pp in layouts:
            try:
                found = self._memory(tp, pp)
            except CapacityError:
                continue
            tokens = (found.num_blocks - found.state_blocks) * BLOCK
            if tokens >= min(SEQUENCE, self.model.max_position_embeddings):
                return (tp, pp), found
        return None

    def _memory(self, tp: int, pp: int) -> EngineMemory:
        layers = stage_layers(self.model.num_layers, pp)
        numbers = self.kernels.number_bytes if self.kernels else TWO_BYTES
        setting = STACK_SHARES[self.stack or "vllm"]
        return engine_memory(
            self.model, self.device, tp, layers, BLOCK, setting, SHARE, ITERATION, numbers
        )

    @cached_property
    def origins(self) -> dict[str, Provenance]:
        """The origin of every op's times in the smallest layout; empty if no layout runs."""
        if self.memory is None:
            return {}
        return self.sources[self.memory[0][0]].provenance()

    @property
    def kind(self) -> str:
        """The least direct origin of the layer's GEMMs, experts and attention."""
        wanted = (*FAMILIES["GEMM"], *FAMILIES["experts"], *FAMILIES["attention"])
        kinds = [self.origins[op].kind for op in wanted if op in self.origins]
        return max(kinds, key=KINDS.index)

    @property
    def off_pct(self) -> dict[str, float]:
        """The widest half-width of the 90 % bands in percent, by family of ops."""
        return {
            family: max(self.origins[op].half_width_pct for op in ops if op in self.origins)
            for family, ops in FAMILIES.items()
            if any(op in self.origins for op in ops)
        }

    @property
    def caches(self) -> list[str]:
        """The number formats of the KV cache."""
        if self.stack is None:
            return ["bf16"]
        tp = min(self.sources)
        found: list[str] = []
        for cache in KV_DTYPES:
            assert self.kernels is not None
            kernels = replace(self.kernels, kv_cache_dtype=cache)
            try:
                op_source(self.device, self.model, tp, kernels)
            except ValueError:
                continue
            found.append(cache)
        return found

    def as_json(self) -> dict[str, Any]:
        """The combination as plain values."""
        about = {"model": self.model.name, "device": self.device.name, "stack": self.stack}
        common = {**about, "dtype": self.dtype, "tp": sorted(self.sources), "refused": self.refused}
        if self.memory is None:
            return {**common, "runs": False}
        (tp, pp), memory = self.memory
        return {
            **common,
            "runs": True,
            "kind": self.kind,
            "kv_cache_dtypes": self.caches,
            "smallest": {"tp": tp, "pp": pp},
            "ops": {op: asdict(origin) for op, origin in self.origins.items()},
            "memory": memory.as_json(),
        }


def supported(
    model: str | None = None,
    device: str | None = None,
    stack: str | None = None,
    dtype: str | None = None,
) -> list[Combination]:
    """The cells of the given names; a name that is None stands for all.

    Raises UserError for an unknown name.
    """
    named = (("--stack", stack, STACKS), ("--dtype", dtype, WEIGHT_DTYPES))
    for option, value, allowed in named:
        if value is not None and value not in allowed:
            hint = did_you_mean(value, allowed)
            raise UserError(f"{option} {value}: must be one of {', '.join(allowed)}{hint}")
    models = [load_model(name) for name in ([model] if model else list_models())]
    devices = [load_device(name) for name in ([device] if device else list_devices())]
    return [cell for cell in cells(models, devices, stack) if dtype is None or cell.dtype == dtype]


def cells(
    models: Sequence[ModelSpec], devices: Iterable[DeviceSpec], only: str | None = None
) -> Iterator[Combination]:
    """Every cell (of the stack ``only``), device by device and stack by stack."""
    for device in devices:
        stacks: list[Stack | None] = [*stacks_on(device.name)]
        if device.fitted is not None or not stacks:
            stacks.append(None)
        for stack in [stack for stack in stacks if only in (None, stack)]:
            for dtype in WEIGHT_DTYPES if stack else WEIGHT_DTYPES[:1]:
                for model in models:
                    yield _cell(model, device, stack, dtype)


def _cell(
    model: ModelSpec, device: DeviceSpec, stack: Stack | None, dtype: WeightDtype
) -> Combination:
    kernels = _kernels(stack, dtype, model, device)
    sources: dict[int, ShardTimes] = {}
    refused: dict[str, tuple[int, ...]] = {}
    for tp in (2**i for i in range(device.gpus_per_node.bit_length())):
        try:
            found = op_source(device, model, tp, kernels)
            if isinstance(found, Path):  # a shipped profile: the table lists its device model
                found = DeviceTimes(device.name, model, tp)
            sources[tp] = found
        except ValueError as error:
            refused[str(error)] = (*refused.get(str(error), ()), tp)
    cell = Combination(model, device, stack, dtype, sources, refused)
    if sources and cell.memory is None:
        refused[f"does not fit {max(sources)} x {_MOST_STAGES} GPUs"] = tuple(sources)
    return cell


def build(cell: Combination, degrees: Iterable[int] | None = None) -> None:
    """Time every op at a small and a large size, at these TP degrees (None: all of the cell).

    Raises ValueError for a time that is not positive and finite.
    """
    one, many, model = np.array([1.0, 64.0]), np.array([512.0, 4096.0]), cell.model
    for tp in cell.sources if degrees is None else degrees:
        source = cell.sources[tp]
        times = {op: source.by_rows(op, many) for op in model.row_ops}
        times[ATTENTION[0]] = source.prefill(many, many)
        times[ATTENTION[1]] = source.decode(one, many)
        times |= {op: source.send_recv(1024 * many, scope) for op, scope in SENDS.items()}
        if tp > 1:
            times[ALL_REDUCE] = source.all_reduce(1024 * many)
        for op, found in times.items():
            if not (np.isfinite(found) & (found > 0)).all():
                where = f"{model.name} on {cell.device.name}, tp {tp}, {cell.kernels}"
                raise ValueError(f"{where}: {op} takes {found} us")


#: Kinds of op times as the matrix writes them.
LETTERS = {"measured": "m", "interpolated": "i", "derived": "d", "modelled": "p"}
LEGEND = (
    f"A cell is the smallest layout that holds a sequence of {SEQUENCE:,} tokens beside the "
    f"weights, with {SHARE:.0%} of the memory and {ITERATION.tokens:,} tokens an iteration: GPUs "
    "of tensor parallelism, x pipeline stages. The letter says where GEMM and attention times come "
    "from: m: measured with this shape and these head counts; i: interpolated between measured "
    "ones; d: derived from the same chip with other memory, or borrowed from another GPU of the "
    "architecture; p: physics only, fitted to "
    "measurements. The number is the half-width in percent of the widest 90 % band of the layer's "
    "GEMMs. The stack that needs the fewest GPUs counts, then the most direct. -: refused."
)


def support_answer(
    found: Sequence[Combination], model: str | None, device: str | None, dtype: str | None
) -> Section:
    """The answer for the cells of a model or a device; without either, the matrix of ``dtype``."""
    runs = [cell for cell in found if cell.memory is not None]
    if model is None and device is None:
        grid = matrix(found, dtype or WEIGHT_DTYPES[0])
        broken = [name.replace("-", "\n") for name in grid.headings]  # for a narrow terminal
        return _section(found, [by_device(found), replace(grid, headings=broken)])
    tables = [details(runs)]
    if model and device:
        tables += [grid for cell in runs for grid in _of_cell(cell)]
    return _section(found, [grid for grid in (*tables, refusals(found)) if grid.rows] or tables)


def _pairs(cells: Iterable[Combination]) -> set[tuple[str, str]]:
    return {(cell.model.name, cell.device.name) for cell in cells}


def _section(found: Sequence[Combination], tables: Sequence[Table]) -> Section:
    every, runs = _pairs(found), _pairs(cell for cell in found if cell.memory is not None)
    answer = f"{len(runs)} of {len(every)} pairs of a model and a device run."
    if len(every) == 1:
        ((model, device),) = every
        least = min((math.prod(cell.memory[0]) for cell in found if cell.memory), default=0)
        answer = f"{model} {f'runs on {least} x' if least else 'does not run on'} {device}."
    question = "What runs where?"
    return Section("support", "models", question, answer, tables)


def _grid(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> Table:
    return Table(title, headings, rows, note, text=len(headings))


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
    rows = [(m, *(_short(best.get((m, d))) for d in used)) for m in models]
    note = LEGEND if dtype == WEIGHT_DTYPES[0] else ""
    return _grid(f"Models, {dtype}", ("model", *used), rows, note)


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
    """The measurements of each device: stacks, versions, number formats."""
    rows = list[tuple[str, ...]]()
    for device, stack in dict.fromkeys((cell.device.name, cell.stack) for cell in found):
        mine = [c for c in found if (c.device.name, c.stack) == (device, stack)]
        dtypes = [d for d in WEIGHT_DTYPES if any(c.dtype == d and c.sources for c in mine)]
        kernels = load_stack(device, stack)[0].kernels if stack else {}
        of_nccl = {fit.version for name, fit in kernels.items() if "nccl" in name}
        versions = {fit.version for fit in kernels.values()} - of_nccl
        versions |= {*versions_on(device, stack)} if stack else set()
        degrees = sorted({tp for cell in mine for tp in cell.sources})
        rows.append(
            (
                device,
                stack or "(calibrated)",
                ", ".join([*sorted(versions), *(f"NCCL {v}" for v in sorted(of_nccl))]) or "-",
                ", ".join(dtypes) or "-",
                ", ".join(map(str, degrees)) or "-",
                f"{len({c.model.name for c in mine if c.memory})}",
            )
        )
    return _grid("Devices", ("device", "kernels of", "versions", "dtypes", "TP", "models"), rows)


def details(found: Iterable[Combination]) -> Table:
    """A row for every cell that runs."""
    rows = list[tuple[str, ...]]()
    for cell in found:
        if cell.memory is not None:
            off = (f"{cell.off_pct[f]:.0f}" if f in cell.off_pct else "-" for f in FAMILIES)
            where = (cell.model.name, cell.device.name, cell.stack or "(calibrated)", cell.dtype)
            degrees = ", ".join(map(str, sorted(cell.sources)))
            cache = ", ".join(cell.caches)
            rows.append((*where, cache, degrees, _layout(cell), cell.kind, *off))
    half_widths = (f"{family} ±%" for family in FAMILIES)
    about = ("model", "device", "stack", "dtype", "KV cache", "TP", "smallest", "op times")
    return _grid("Layouts and op times", (*about, *half_widths), rows)


def _of_cell(cell: Combination) -> list[Table]:
    """Every op's origin, and the memory of a GPU in the smallest layout."""
    assert cell.memory is not None
    (tp, pp), memory = cell.memory
    title = f"{cell.kernels.name if cell.kernels else 'calibrated device'}, tp {tp}, pp {pp}"
    ops = [(op, f"{one.half_width_pct:.1f}", one.mark) for op, one in cell.origins.items()]
    parts = [(name, f"{size / 1e9:.2f}", how) for name, size, how in memory.parts()]
    return [
        _grid(title, ("op", "±%", "from"), ops),
        _grid(title, ("a GPU's", "GB", "origin"), parts),
    ]


def refusals(found: Iterable[Combination], where: str = "") -> Table:
    """Reasons for refusals, each with its TP degrees and models."""
    models: dict[tuple[str, str], dict[str, None]] = {}
    for cell in found:
        for reason, degrees in cell.refused.items():
            key = reason, ", ".join(map(str, degrees))
            models.setdefault(key, {})[cell.model.name] = None
    rows = [(reason, tps, ", ".join(names)) for (reason, tps), names in models.items()]
    return _grid(f"Refused{where}", ("refused because", "TP", "models"), rows)
