"""The account of a GPU's memory beside what engines say at their start:

    python -m sarathi_sim.experiments.lab.servers.startup_lines FILE docs/lab/memory.md

FILE has a line for each server, with the KV tokens, blocks of 16, or GiB a GPU that it printed. The
page has these, ours, and the parts of ours; what a line does not state is the engine's default.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sarathi_sim.profiler.facts.device import engine_facts, load_device, memory_class
from sarathi_sim.profiler.facts.formats import KV_BYTES, WEIGHT_BYTES, NumberBytes
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.engine_memory import (
    STACK_SHARES,
    EngineMemory,
    Step,
    engine_memory,
    stage_layers,
)
from ..pages import markdown
from .page import put
from .rows import read_whole
from .scenarios import VLLM_LIMITS, sglang_memory

BLOCK = 16
_KNOWN: dict[str, Any] = read_mapping(data_dir() / "lab" / "startup_lines.yaml")
_UNITS = {"tokens": BLOCK, "blocks of 16": 1}
_OF_SGLANG = ("chunked_prefill_size", "max_running_requests", "mem_fraction_static")


class StartupLine(BaseModel):
    """A server, and the number that its engine printed."""

    model_config = ConfigDict(extra="ignore")

    engine: str
    version: str = ""
    gpu: str
    tp: int
    pp: int
    model: str
    dtype_quantization: str
    kv_cache_dtype: str = ""
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    measured_value: float
    unit: str
    note: str = ""

    @property
    def release(self) -> str:
        """The engine's version: as stated, or as the note dates it."""
        dated = (version for words, version in _KNOWN["dated"].items() if words in self.note)
        return self.version or next(dated, "")

    @cached_property
    def memory(self) -> EngineMemory | str:
        """Our account of the server, or why there is none."""
        try:
            return self._account()
        except ValueError as error:
            return str(error)

    @property
    def ours(self) -> float | None:
        """Our number, in the line's unit."""
        if isinstance(self.memory, str):
            return None
        blocks = _UNITS.get(self.unit)
        return float(self.memory.num_blocks * blocks) if blocks else self.memory.kv_bytes / 2**30

    def _account(self) -> EngineMemory:
        device, model = load_device(self.gpu), _model(self.model)
        if self.engine not in STACK_SHARES:
            raise UserError(f"engine {self.engine}: one of {', '.join(STACK_SHARES)}")
        if self.engine == "sglang":
            known = {"max_running_requests": 2048} | sglang_memory(device, self.tp, self.pp)
            usual = [known[key] for key in _OF_SGLANG]
        else:
            facts, memory = engine_facts("vllm"), memory_class(device)
            usual = [facts.at(key, self.release, memory=memory) for key in VLLM_LIMITS]
        chunk, sequences, share = (
            getattr(self, key) or value for key, value in zip(VLLM_LIMITS, usual, strict=True)
        )
        sampler = "flashinfer" if "FlashInfer sampler in use" in self.note else ""
        step = Step(int(chunk), int(sequences), version=self.release, sampler=sampler)
        layers, setting = stage_layers(model.num_layers, self.pp), STACK_SHARES[self.engine]
        dtype = self.dtype_quantization.partition(" ")[0].replace("int4", "int4_wo")
        kv = KV_BYTES["fp8" if self.kv_cache_dtype.startswith("fp8") else "bf16"]
        if "experts" in self.dtype_quantization:  # of which alone are quantised
            numbers = NumberBytes(2, 2.0, kv, 0.5 + 2 / 32)
        else:
            numbers = NumberBytes(2, WEIGHT_BYTES[dtype], kv)  # type: ignore[index]
        sizes = (model, device, self.tp, layers, BLOCK)
        return engine_memory(*sizes, setting, float(share), step, numbers)


def _model(name: str) -> ModelSpec:
    if (sizes := _KNOWN["sizes"].get(name)) is None:
        return load_model(_KNOWN["same"].get(name, name))
    usual: dict[str, Any] = {"head_dim": 128, "gated_ffn": True, "tied_embeddings": False}
    usual["max_position_embeddings"] = 131072
    return ModelSpec(name=name.rpartition("/")[2].lower(), **sizes, **usual)


_HEADINGS = ("server", "measured", "ours", "difference", *("weights", "peak", "outside", "KV"))


def page_tables(lines: Sequence[StartupLine]) -> str:
    """The two tables of the page, as Markdown."""
    off = [abs(line.ours / line.measured_value - 1) for line in lines if line.ours is not None]
    shares = [("lines", str(len(lines))), ("with an account of ours", str(len(off)))]
    shares += [(f"within {p} %", str(sum(one <= p / 100 for one in off))) for p in (1, 3, 5, 10)]
    counts = markdown("Lines within", ("", "number"), shares)
    return f"{counts}\n{markdown('Start-up lines', _HEADINGS, map(_cells, lines))}"


def _cells(line: StartupLine) -> list[str]:
    memory, ours, unit = line.memory, line.ours, line.unit.replace(" available for KV", "")
    layout = f"TP {line.tp}" + (f" PP {line.pp}" if line.pp != 1 else "")
    release = line.release or "of unknown version"
    server = f"{line.engine} {release}, {line.gpu} {layout}, {line.model.rpartition('/')[2]}"
    if isinstance(memory, str) or ours is None:
        return [f"{server}: {memory}", f"{line.measured_value:,.6g} {unit}", *[""] * 6]
    sizes = (memory.weight_bytes, memory.activation_bytes, memory.non_torch_bytes, memory.kv_bytes)
    digits = ",.2f" if "GiB" in unit else ",.0f"
    numbers = (f"{line.measured_value:{digits}} {unit}", f"{ours:{digits}}")
    off = f"{ours / line.measured_value - 1:+.1%}"
    return [server, *numbers, off, *(f"{size / 2**30:.2f}" for size in sizes)]


if __name__ == "__main__":
    put(Path(sys.argv[2]), page_tables([*read_whole(Path(sys.argv[1]), StartupLine).values()]))
