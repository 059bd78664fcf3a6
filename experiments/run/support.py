"""Which models run on which devices, by stack and number format, with the error of their op times.

Op times come from :func:`op_source`, as for ``run``, layouts from the engine's memory formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.facts import formats
from sarathi_sim.profiler.facts.device import DeviceSpec, engine_facts, list_devices, load_device
from sarathi_sim.profiler.facts.formats import WEIGHT_DTYPES, Kernels, Stack, WeightDtype
from sarathi_sim.profiler.facts.model import ModelSpec, list_models, load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ALL_ROW_OPS, ATTENTION, MOE, OPS
from sarathi_sim.profiler.kernels.op_source import op_source, served_formats
from sarathi_sim.profiler.kernels.stack_file import stacks_on
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
    ``refused`` says why, and at which TP degrees."""

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
        """The TP and PP of the smallest layout that holds the model, and the memory per GPU."""
        longest = max(self.sources, default=1)
        layouts = [(tp, 1) for tp in sorted(self.sources)]
        layouts += [(longest, pp) for pp in range(2, _MOST_STAGES + 1) if self.sources]
        numbers = self.kernels.number_bytes if self.kernels else formats.TWO_BYTES
        usual = (BLOCK, STACK_SHARES[self.stack or "vllm"], SHARE, ITERATION, numbers)
        for tp, pp in layouts:
            try:
                layers = stage_layers(self.model.num_layers, pp)
                found = engine_memory(self.model, self.device, tp, layers, *usual)
            except CapacityError:
                continue
            tokens = (found.num_blocks - found.state_blocks) * BLOCK
            if tokens >= min(SEQUENCE, self.model.max_position_embeddings):
                return (tp, pp), found
        return None

    @cached_property
    def origins(self) -> dict[str, Provenance]:
        """The origin of every op's times in the smallest layout; empty if no layout runs."""
        if self.memory is None:
            return {}
        return self.sources[self.memory[0][0]].provenance()

    @property
    def kind(self) -> str:
        """The least direct origin of the layer's GEMMs, experts and attention."""
        wanted = (op for family, ops in FAMILIES.items() if family != "all-reduce" for op in ops)
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
        for cache in formats.KV_DTYPES:
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
        common = {
            **about,
            "dtype": self.dtype,
            "tp": sorted(self.sources),
            "refused": self.refused,
        }
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
    """The cells of the given names (None: all). Raises UserError for an unknown name."""
    named = (("--stack", stack, formats.STACKS), ("--dtype", dtype, WEIGHT_DTYPES))
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
