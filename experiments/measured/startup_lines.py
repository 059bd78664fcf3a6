"""The account of a GPU's memory beside what engines say at their start:

    python -m sarathi_sim.experiments.measured.startup_lines FILE docs/lab/memory.md

FILE has a line for each server: its engine, version, GPU, layout, model, formats and flags, and the
KV tokens, blocks of 16, or GiB a GPU that it printed. The page has the measured values, ours, and
the parts of ours; what a line does not state is the engine's default.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sarathi_sim.experiments.lab.pages import markdown, update
from sarathi_sim.experiments.measured.launch_scripts import sglang_memory
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.engines import engine_facts, memory_class
from sarathi_sim.profiler.facts.formats import KV_BYTES, WEIGHT_BYTES, NumberBytes
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.engine_memory import (
    STACK_SHARES,
    EngineMemory,
    Step,
    engine_memory,
    stage_layers,
)

BLOCK = 16
#: Shipped models of a line's checkpoint: the same sizes under another name.
_SAME = {
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "llama-3.3-70b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama-4-scout",
    "zai-org/GLM-5.1-FP8": "glm-5",
    "moonshotai/Kimi-K2-Thinking": "kimi-k2.5",
}
#: Layers, hidden size, heads, KV heads, FFN and vocabulary of dense models that are not shipped
#: (their config.json).
_SIZES = {
    "mistralai/Mistral-Nemo-Instruct-2407": (40, 5120, 32, 8, 14336, 131072),
    "01-ai/Yi-34B": (60, 7168, 56, 8, 20480, 64000),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": (48, 5120, 40, 8, 13824, 152064),
}
_HEAD_DIM = 128
#: Versions of lines that state none, by what their note says.
_DATED = {"2026-01-26": "0.14", "0.8 to 0.11": "0.10", "between 0.11.0 and": "0.11"}
_COLUMNS = (
    *("engine", "version", "gpu", "tp", "pp", "model", "dtype_quantization", "kv_cache_dtype"),
    *("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "measured_value"),
    *("unit", "note"),
)
_UNITS = {"tokens": BLOCK, "blocks of 16": 1}


@dataclass(frozen=True)
class StartupLine:
    """A server's line, and our account of it, or the reason why there is none."""

    row: Mapping[str, str]
    memory: EngineMemory | None
    why: str = ""

    @property
    def measured(self) -> float:
        """The number that the engine printed."""
        return float(self.row["measured_value"])

    @property
    def ours(self) -> float | None:
        """Ours, in the line's unit."""
        if self.memory is None:
            return None
        if self.row["unit"] not in _UNITS:
            return self.memory.kv_bytes / 2**30
        return float(self.memory.num_blocks * _UNITS[self.row["unit"]])

    @property
    def off(self) -> float | None:
        """The relative difference of ours."""
        return None if self.ours is None else self.ours / self.measured - 1


def read(path: Path) -> list[StartupLine]:
    """The lines of a file. Raises UserError where it has not the columns."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if lacking := [name for name in _COLUMNS if name not in (rows.fieldnames or ())]:
            raise UserError(f"{path}: no column {lacking[0]}: not a list of start-up lines")
        return [_line(row) for row in rows]


def _line(row: dict[str, str]) -> StartupLine:
    try:
        return StartupLine(row, account(row))
    except (UserError, ValueError) as error:
        return StartupLine(row, None, str(error))


def account(row: Mapping[str, str]) -> EngineMemory:
    """Our account of a line's server. Raises UserError where there is none."""
    name, device, model = row["engine"], load_device(row["gpu"]), _model(row["model"])
    if name not in STACK_SHARES:
        raise UserError(f"engine {name}: one of {', '.join(STACK_SHARES)}")
    tp, pp = int(row["tp"]), int(row["pp"])
    setting = STACK_SHARES[name]
    usual = defaults(row)
    known = {key: float(row[key] or usual[key]) for key in usual}
    sampler = "flashinfer" if "FlashInfer sampler in use" in row["note"] else ""
    step = Step(
        int(known["max_num_batched_tokens"]),
        int(known["max_num_seqs"]),
        version=version(row),
        sampler=sampler,
    )
    layers = stage_layers(model.num_layers, pp)
    return engine_memory(
        model, device, tp, layers, BLOCK, setting, known["gpu_memory_utilization"], step,
        _numbers(row, model),
    )  # fmt: skip


def version(row: Mapping[str, str]) -> str:
    """The engine's version: as stated, or as the note dates it."""
    dated = (of for words, of in _DATED.items() if words in row["note"])
    return row["version"] or next(dated, "")


def defaults(row: Mapping[str, str]) -> dict[str, float]:
    """What the engine takes where the line says nothing."""
    device = load_device(row["gpu"])
    if row["engine"] == "sglang":
        found = sglang_memory(device, int(row["tp"]), int(row["pp"]))
        share, chunk = found["mem_fraction_static"], found["chunked_prefill_size"]
        return {"max_num_batched_tokens": chunk, "max_num_seqs": 2048,
                "gpu_memory_utilization": share}  # fmt: skip
    facts, of = engine_facts("vllm"), version(row)
    keys = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization")
    return {key: facts.at(key, of, memory=memory_class(device)) for key in keys}


def _model(name: str) -> ModelSpec:
    if (sizes := _SIZES.get(name)) is None:
        return load_model(_SAME.get(name, name))
    layers, hidden, heads, kv_heads, ffn, vocab = sizes
    return ModelSpec(
        name=name.rpartition("/")[2].lower(), num_layers=layers, hidden_size=hidden,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=_HEAD_DIM, ffn_hidden_size=ffn,
        gated_ffn=True, vocab_size=vocab, tied_embeddings=False, max_position_embeddings=131072,
    )  # fmt: skip


def _numbers(row: Mapping[str, str], model: ModelSpec) -> NumberBytes:
    dtype = row["dtype_quantization"].partition(" ")[0]
    experts_alone = "experts" in row["dtype_quantization"]
    dtype = {"int4": "int4_wo"}.get(dtype, dtype)
    kv = KV_BYTES["fp8" if row["kv_cache_dtype"].startswith("fp8") else "bf16"]
    if experts_alone:
        return NumberBytes(2, 2.0, kv, 0.5 + 2 / 32)
    return NumberBytes(2, WEIGHT_BYTES[dtype], kv)  # type: ignore[index]


_HEADINGS = ("server", "measured", "ours", "difference", *("weights", "peak", "outside", "KV"))


def page_tables(lines: list[StartupLine]) -> str:
    """The two tables of the page, as Markdown."""
    off = [abs(line.off) for line in lines if line.off is not None]
    shares = [("lines", str(len(lines))), ("with an account of ours", str(len(off)))]
    shares += [(f"within {p} %", str(sum(one <= p / 100 for one in off))) for p in (1, 3, 5, 10)]
    counts = markdown("Lines within", ("", "number"), shares)
    return f"{counts}\n{markdown('Start-up lines', _HEADINGS, map(_cells, lines))}"


def _cells(line: StartupLine) -> list[str]:
    row, memory = line.row, line.memory
    layout = f"TP {row['tp']}" + (f" PP {row['pp']}" if row["pp"] != "1" else "")
    name = row["model"].rpartition("/")[2]
    of = version(row) or "of unknown version"
    server = f"{row['engine']} {of}, {row['gpu']} {layout}, {name}"
    unit = row["unit"].replace(" available for KV", "")
    if memory is None or line.ours is None or line.off is None:
        return [f"{server}: {line.why}", f"{line.measured:,.6g} {unit}", *[""] * 6]
    sizes = (memory.weight_bytes, memory.activation_bytes, memory.non_torch_bytes, memory.kv_bytes)
    parts = [f"{size / 2**30:.2f}" for size in sizes]
    ours = f"{line.ours:,.2f}" if "GiB" in unit else f"{line.ours:,.0f}"
    measured = f"{line.measured:,.2f}" if "GiB" in unit else f"{line.measured:,.0f}"
    return [server, f"{measured} {unit}", ours, f"{line.off:+.1%}", *parts]


if __name__ == "__main__":
    page = Path(sys.argv[2])
    write_whole(page, update(page.read_text("utf-8"), page_tables(read(Path(sys.argv[1])))))
