"""LLMServingSim's A6000 profile of Llama-3.1-8B: GEMMs at every token count, flash attention.

Its newer profiles (``profiler/perf``) are read by ``llmservingsim_perf.py``.

The reader handles these traps: layer latencies are nanoseconds and attention milliseconds;
kv_cache_size includes the chunk, and is the total of the batch in decode rows; q, k, v and gate, up
are separate GEMMs, while a bundle has them fused; norms, rotary, activation and ``attn`` are
unfused eager kernels, left out.
"""

from __future__ import annotations

from pathlib import Path

from sarathi_sim.profiler.bundle.schema import Bundle, BundleError
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.importers.assemble import Publication, assemble
from sarathi_sim.profiler.importers.head_counts import attention_part
from sarathi_sim.profiler.importers.llmservingsim_perf import device_of, import_perf
from sarathi_sim.profiler.importers.shapes import ShapePool
from sarathi_sim.profiler.physics.shard_times import DeviceModel
from sarathi_sim.profiler.physics.study import LLMSERVINGSIM
from sarathi_sim.profiler.public import frames as data
from sarathi_sim.profiler.public.measured_csv import source_folder
from sarathi_sim.profiler.public.perf_tables import ATTENTION, BY_SEQUENCE, DENSE, META, is_perf

FOLDER = "llmservingsim_a6000"
_DEVICE = "a6000"
_GEMM_FILE = "layers_Llama-3.1-8B_tp1.csv"
_ATTENTION_FILE = "attention_Llama-3.1-8B_tp1.csv"
_SOURCE = Publication(
    "llmservingsim",
    LLMSERVINGSIM,
    "NVIDIA RTX A6000; NGC PyTorch 25.01 by the repository's documentation",
    "float16",
)
FORMS = (
    f"{_GEMM_FILE} and {_ATTENTION_FILE} (its A6000 profile), or a model's folder of profiler/perf "
    f"in bf16 or fp16, with {META}, {DENSE}, {BY_SEQUENCE} and {ATTENTION} (or in tp1, tp2, ...)"
)


def measured_on(folder: Path) -> str:
    """The device of the folder's measurements. Raises BundleError if no shipped device has it."""
    return device_of(folder) if is_perf(folder) else _DEVICE


def import_llmservingsim(folder: Path, model: ModelSpec, tp: int, device: DeviceSpec) -> Bundle:
    """A bundle from a folder of LLMServingSim's: its A6000 files, or a ``profiler/perf`` folder.

    Of the former, fused projections are interpolated over n between the separate ones.
    Raises BundleError for a folder of neither form, another device, or a model far from
    Llama-3.1-8B at tp 1 (in a ``profiler/perf`` folder: another model than was measured).
    """
    if is_perf(folder):
        return import_perf(folder, model, tp, device)
    here = source_folder(folder, FOLDER)
    if not (here / _GEMM_FILE).is_file():
        raise BundleError(f"llmservingsim: {here} has none of its forms: {FORMS}")
    if device.name != _DEVICE:
        raise BundleError(
            f"llmservingsim: {here} was measured on {_DEVICE}, "
            f"not on {device.name}: leave --device out"
        )
    pool = ShapePool(data.llmservingsim_gemm(folder), device, _GEMM_FILE)
    parts = {op: pool.part(shape) for op, shape in model.gemms(tp).items()}
    if (here / _ATTENTION_FILE).is_file():
        times = DeviceModel(device.name)
        prefill, decode = data.llmservingsim_attention(folder)
        for op, rows in (("attn_prefill", prefill), ("attn_decode", decode)):
            parts[op] = attention_part(op, rows, model, tp, times, _ATTENTION_FILE)
    found = {op: part for op, part in parts.items() if part is not None}
    return assemble(_SOURCE, device, model, tp, found)
