"""aiconfigurator's A100 tables: GEMMs over a grid of (n, k), attention by head count, NCCL.

The reader handles these traps: times are milliseconds; sizes of messages are ELEMENTS of 2 bytes; a
file holds several frameworks, of which one is used; decode context is ``step``, per sequence; some
rows are so fast that their data came from L2, which does not happen in a server.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from sarathi_sim.experiments.lab.fit.devices import AIC
from sarathi_sim.profiler.bundle.schema import Bundle, BundleError
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.importers.assemble import Part, Publication, assemble
from sarathi_sim.profiler.importers.shapes import ShapePool, attention_part, with_context
from sarathi_sim.profiler.physics.shard_times import DeviceModel
from sarathi_sim.profiler.public import frames as data
from sarathi_sim.profiler.public.kernel_tables import FOLDER as PARQUET
from sarathi_sim.profiler.public.measured_csv import source_folder

FOLDER = "aiconfigurator_a100_sxm"
_GEMM = "gemm_bf16.csv"
_DEVICE = "a100-80g-sxm"
_SOURCE = Publication(
    "aiconfigurator",
    AIC,
    "NVIDIA A100-SXM4-80GB; GEMM SGLang 0.5.10, attention vLLM 0.14.0 and TensorRT-LLM 1.0.0, "
    "NCCL 2.27.3",
    "bfloat16",
)
#: Of HBM bandwidth: decode rows above it were read from L2.
_HBM_SHARE = 0.9
_MAX_CONTEXT = 8192


def import_aiconfigurator(folder: Path, model: ModelSpec, tp: int, device: DeviceSpec) -> Bundle:
    """A bundle from the folder of aiconfigurator's A100 files.

    Shapes that its grid lacks are interpolated; what it did not measure (elementwise ops,
    embedding, cached context, point to point) is modelled. Raises BundleError for another device.
    """
    if device.name != _DEVICE:
        raise BundleError(
            f"aiconfigurator: {source_folder(folder, FOLDER)} was measured on {_DEVICE}, "
            f"not on {device.name}: leave --device out"
        )
    if (folder / PARQUET).is_dir() and not (source_folder(folder, FOLDER) / _GEMM).is_file():
        raise BundleError(
            f"{folder}: of aiconfigurator this holds the parquet tables ({PARQUET}/), which a run "
            f"with stack asks; the CSVs of {FOLDER}/ are read here"
        )
    pool = ShapePool(data.aic_gemm(folder), device, f"{_GEMM}, SGLang")
    parts = {op: pool.part(shape) for op, shape in model.gemms(tp).items()}
    times = DeviceModel(device.name)
    here = source_folder(folder, FOLDER)
    if (here / "attention_prefill_bf16.csv").is_file():
        parts["attn_prefill"] = _prefill(folder, model, tp, times)
    if (here / "attention_decode_bf16.csv").is_file():
        parts["attn_decode"] = _decode(folder, model, tp, times)
    if tp > 1 and (here / "nccl_collectives.csv").is_file():
        rows = data.aic_all_reduce(folder, tp)
        origin = f"nccl_collectives.csv, {tp} GPUs, half"
        parts["all_reduce"] = Part(rows, "measured", origin) if len(rows) else None
    found = {op: part for op, part in parts.items() if part is not None}
    return assemble(_SOURCE, device, model, tp, found)


def _prefill(folder: Path, model: ModelSpec, tp: int, times: DeviceModel) -> Part | None:
    framework = "VLLM" if model.heads_per_rank(tp)[0] <= 64 else "SGLang"
    rows = data.aic_prefill(folder, framework)
    rows = rows[rows["batch"] == 1]
    origin = f"attention_prefill_bf16.csv, {framework}"
    part = attention_part("attn_prefill", rows, model, tp, times, origin)
    if part is None:
        return None
    # One chunk of 8 thousand tokens after as many cached ones is as far as the device model goes.
    near = Part(part.rows[part.rows["chunk_tokens"] <= _MAX_CONTEXT], part.kind, part.origin)
    whole = with_context(near, model, tp, times, _MAX_CONTEXT)
    far = part.rows[part.rows["chunk_tokens"] > _MAX_CONTEXT]
    return Part(pd.concat([whole.rows, far], ignore_index=True), whole.kind, whole.origin)


def _decode(folder: Path, model: ModelSpec, tp: int, times: DeviceModel) -> Part | None:
    """MHA from TensorRT-LLM and GQA from vLLM, for the reasons given in the device model."""
    heads, kv_heads = model.heads_per_rank(tp)
    framework = "TRTLLM" if heads == kv_heads else "VLLM"
    rows = data.aic_decode(folder, framework)
    # Reading every row's keys and values once in its time, in bytes a second.
    kv_bytes = 4 * rows["head_dim"] * rows["kv_heads"] * rows["batch"] * rows["context"]
    rate = 1e6 * kv_bytes / rows["time_us"]
    kept = rows[rate <= _HBM_SHARE * times.spec.memory_bandwidth]
    origin = (
        f"attention_decode_bf16.csv, {framework}, rows above {100 * _HBM_SHARE:.0f} % of HBM "
        "bandwidth left out"
    )
    return attention_part("attn_decode", kept, model, tp, times, origin)
