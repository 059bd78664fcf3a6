"""LLMServingSim: its A6000 profile of Llama-3.1-8B, and its newer ``profiler/perf`` folders.

The latter are read by ``public/perf_tables.py``. Of the former the reader handles these traps:
layer latencies are nanoseconds and attention milliseconds; kv_cache_size includes the chunk, and is
the total of the batch in decode rows; q, k, v and gate, up are separate GEMMs, while a bundle has
them fused; norms, rotary, activation and ``attn`` are unfused eager kernels, left out.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from sarathi_sim.experiments.lab.fit.devices import LLMSERVINGSIM, Origin
from sarathi_sim.profiler.bundle.schema import TABLES, Bundle, BundleError
from sarathi_sim.profiler.facts.device import DeviceSpec, list_devices
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import DECODE, LAYER_OPS, OPS, PREFILL
from sarathi_sim.profiler.importers.assemble import Kind, Part, Publication, assemble
from sarathi_sim.profiler.importers.shapes import ShapePool, attention_part
from sarathi_sim.profiler.physics.shard_times import DeviceModel, rounded_us
from sarathi_sim.profiler.public import frames as data
from sarathi_sim.profiler.public.measured_csv import merged, source_folder
from sarathi_sim.profiler.public.perf_tables import (
    ATTENTION,
    BY_SEQUENCE,
    DENSE,
    LAYERS,
    META,
    alone,
    attention_cells,
    degree_folder,
    is_perf,
    op_rows,
    perf_meta,
)

_DTYPES: dict[str, Literal["float16", "bfloat16"]] = {"bf16": "bfloat16", "fp16": "float16"}
_CHUNK, _DECODES = ("prefill_chunk", "kv_prefill"), ("n_decode", "kv_decode")
_SIZES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
}


def device_of(folder: Path) -> str:
    """The shipped device that the profile was measured on. Raises BundleError if none ships."""
    hardware = str(perf_meta(folder).get("hardware"))
    for name in list_devices():
        if _plain(name) == _plain(hardware):
            return name
    raise BundleError(
        f"{folder / META}: hardware {hardware}: no shipped device is called so "
        f"({', '.join(list_devices())}): name the YAML of one with --device"
    )


def import_perf(folder: Path, model: ModelSpec, tp: int, device: DeviceSpec) -> Bundle:
    """A bundle from a ``profiler/perf`` folder: every op as vLLM ran it on one rank.

    Whole layers (``mixed.csv``) are sums of the linear ops and one attention call over a chunk and
    decodes. Raises BundleError for another device, model, dtype or degree.
    """
    meta = perf_meta(folder)
    here, parts = degree_folder(folder, tp), {}
    _check(folder, meta, model, device)
    for op, layers in LAYERS.items():
        rows, text = op_rows(here, op)
        kind: Kind = "measured" if list(layers.values()) == [1] else "combined"
        parts[op] = Part(rows, kind, text)
    cells = attention_cells(here)
    for op, sizes in ((PREFILL, _CHUNK), (DECODE, _DECODES)):
        names = dict(zip(sizes, OPS[op].columns, strict=True))
        origin = f"rows of {ATTENTION} with nothing else in the call"
        parts[op] = Part(alone(cells, names), "measured", origin)
    chunks, decodes = cells["prefill_chunk"] > 0, cells["n_decode"] > 0
    bundle = assemble(_publication(meta), device, model, tp, parts)
    mixed = _mixed(cells[chunks & decodes], parts)
    about = bundle.meta.environment | {"mixed": mixed.mark()}
    meta_of_all = dataclasses.replace(bundle.meta, environment=about)
    return dataclasses.replace(bundle, meta=meta_of_all, mixed=mixed.rows)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _check(folder: Path, meta: dict[str, Any], model: ModelSpec, device: DeviceSpec) -> None:
    where, hardware = folder / META, str(meta.get("hardware"))
    if _plain(device.name) != _plain(hardware):
        raise BundleError(f"{where}: was measured on {hardware}, not on {device.name}")
    if meta.get("variant") not in _DTYPES:
        raise BundleError(
            f"{where}: variant {meta.get('variant')!r} is not modelled: must be one of "
            f"{', '.join(_DTYPES)}"
        )
    engine, degrees = meta.get("engine_effective"), meta.get("tp_degrees")
    sizes = engine.get("hf_overrides") if isinstance(engine, dict) else None
    ranks = degrees[-1] if isinstance(degrees, list) and degrees else 1  # the last one's are stored
    for theirs, ours in _SIZES.items():
        size, whole = sizes.get(theirs) if isinstance(sizes, dict) else None, getattr(model, ours)
        if type(ranks) is not int or size != max(1, whole // max(1, ranks)):
            of = f" on one of {ranks} ranks" if ranks != 1 else ""
            raise BundleError(
                f"{where}: {theirs} of {meta.get('model')} is {size}{of}, but {model.name} has "
                f"{whole}: give the model that was measured"
            )


def _publication(meta: dict[str, Any]) -> Publication:
    repository = LLMSERVINGSIM.repository.split(" @")[0]
    return Publication(
        "llmservingsim",
        Origin(f"{repository}, profiled {meta.get('profiled_at')}", LLMSERVINGSIM.licence),
        f"{meta.get('gpu')}; {meta.get('model')}, vLLM {meta.get('vllm_version')}, "
        f"CUDA {meta.get('cuda_version')}",
        _DTYPES[meta["variant"]],
    )


def _mixed(cells: pd.DataFrame, parts: dict[str, Part]) -> Part:
    """Whole layers of a chunk and decodes: their linear ops, and the attention of both as one."""
    rows = cells.rename(columns=dict(zip((*_CHUNK, *_DECODES), TABLES["mixed"].key, strict=True)))
    tokens = rows["chunk_tokens"] + rows["batch_size"]
    linear = [parts[op].rows for op in LAYER_OPS]
    measured = tokens <= min(op["num_tokens"].max() for op in linear)
    rows, tokens = rows[measured], tokens[measured]
    around = sum((np.interp(tokens, op["num_tokens"], op["time_us"]) for op in linear), 0.0)
    whole = merged(rows.assign(time_us=rows["time_us"] + around))
    whole["time_us"] = rounded_us(whole["time_us"].to_numpy())
    return Part(whole, "combined", f"linear ops of {DENSE} + one call of {ATTENTION}")


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
