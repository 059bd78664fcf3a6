"""LLMServingSim's profiles: its ``profiler/perf`` folders, and an older one of an A6000.

A ``profiler/perf`` folder of one model holds ``meta.yaml`` and, beside it or below ``tp<k>/``,
``dense.csv`` (ops by tokens, one layer), ``per_sequence.csv`` (ops by sequences) and
``attention.csv``: a chunk of ``prefill_chunk`` tokens after ``kv_prefill`` cached ones, in one call
with ``n_decode`` decodes of ``kv_decode`` tokens each. Traps: times are microseconds; a layer has
two norms, and the file has the time of one; the kernels of vLLM were launched one by one
(``enforce_eager``), so times hold no launches.

Of the A6000's: layer latencies are nanoseconds and attention milliseconds; kv_cache_size includes
the chunk, and is the total of the batch in decode rows; q, k, v and gate, up are separate GEMMs,
while a bundle has them fused; norms, rotary, activation and ``attn`` are unfused eager kernels,
left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.tables import TABLES, BundleError
from sarathi_sim.profiler.facts.device import DeviceSpec, list_devices
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import DECODE, LAYER_OPS, OPS, PREFILL
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from .measurements import (
    DType,
    Measurements,
    OpRows,
    check_device,
    merged,
    read_measurements,
    source_folder,
    sum_of,
    tidy,
)
from .vidur import attention_rows

META, DENSE, BY_SEQUENCE, ATTENTION = "meta.yaml", "dense.csv", "per_sequence.csv", "attention.csv"
#: How often each of its layers runs in one of our ops. The last norm goes with the embedding: both
#: run once, over all tokens.
LAYERS: dict[str, dict[str, int]] = {
    "preproj": {"qkv_proj": 1},
    "postproj": {"o_proj": 1},
    "ffn_ln1": {"gate_up_proj": 1},
    "ffn_ln2": {"down_proj": 1},
    "others": {"layernorm": 2, "act_fn": 1, "rotary_emb": 1},
    "embedding": {"embedding": 1, "final_layernorm": 1},
    "lm_head": {"lm_head": 1, "sampler": 1},
}
_CHUNK, _DECODES = ("prefill_chunk", "kv_prefill"), ("n_decode", "kv_decode")
_DTYPES: dict[str, DType] = {"bf16": "bfloat16", "fp16": "float16"}
_SIZES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
}
_WIDTHS = {"q_proj": 4096, "o_proj": 4096, "k_proj": 1024, "v_proj": 1024, "gate_proj": 14336,
           "up_proj": 14336, "down_proj": 4096, "lm_head": 128256}  # fmt: skip
_DEPTHS = dict.fromkeys(_WIDTHS, 4096) | {"down_proj": 14336}
#: The GEMMs (n, k) of a layer of Llama-3.1-8B as its A6000 ran them, unfused.
LAYER = [(n, _DEPTHS[name]) for name, n in _WIDTHS.items() if name != "lm_head"]
A6000, _DEVICE = "llmservingsim_a6000", "a6000"
_GEMMS, _A6000_ATTENTION = "layers_Llama-3.1-8B_tp1.csv", "attention_Llama-3.1-8B_tp1.csv"
FILES = (
    f"{_GEMMS} and {_A6000_ATTENTION} (its A6000 profile), or a model's folder of "
    f"profiler/perf in bf16 or fp16, with {META}, {DENSE}, {BY_SEQUENCE} and {ATTENTION} (or in "
    "tp1, tp2, ...)"
)


def measured_on(folder: Path) -> str:
    """The shipped device that a folder was measured on. Raises BundleError if none ships."""
    if not is_perf(folder):
        return _DEVICE
    hardware = str(perf_meta(folder).get("hardware"))
    if named := [name for name in list_devices() if _plain(name) == _plain(hardware)]:
        return named[0]
    raise BundleError(
        f"{folder / META}: hardware {hardware}: no shipped device is called so "
        f"({', '.join(list_devices())}): name the YAML of one with --device"
    )


def measurements(folder: Path, model: ModelSpec, tp: int, device: DeviceSpec) -> Measurements:
    """One rank of ``model`` from a ``profiler/perf`` folder, or GEMMs and attention of the A6000.
    Raises BundleError for a folder of neither form, and what was not measured."""
    if is_perf(folder):
        return _perf(folder, model, tp, device)
    here = source_folder(folder, A6000)
    if not (here / _GEMMS).is_file():
        raise BundleError(f"llmservingsim: {here} has none of its forms: {FILES}")
    check_device("llmservingsim", here, _DEVICE, device)
    attention = {}
    if (here / _A6000_ATTENTION).is_file():
        rows = zip((PREFILL, DECODE), llmservingsim_attention(folder), strict=True)
        attention = {op: OpRows(frame, _A6000_ATTENTION) for op, frame in rows}
    return Measurements(
        hardware="NVIDIA RTX A6000; NGC PyTorch 25.01 by the repository's documentation",
        dtype="float16",
        gemms=OpRows(llmservingsim_gemm(folder), _GEMMS),
        attention=attention,
    )


def _perf(folder: Path, model: ModelSpec, tp: int, device: DeviceSpec) -> Measurements:
    """Every op as vLLM ran it, and ``mixed`` iterations."""
    meta, here = perf_meta(folder), degree_folder(folder, tp)
    _check(folder / META, meta, model, device)
    ops, cells = {op: op_rows(here, op) for op in LAYERS}, attention_cells(here)
    for op, sizes in ((PREFILL, _CHUNK), (DECODE, _DECODES)):
        frame = alone(cells, dict(zip(sizes, OPS[op].columns, strict=True)))
        ops[op] = OpRows(frame, f"rows of {ATTENTION} with nothing else in the call")
    # Whole layers of a chunk and decodes, at token counts that all linear ops reach.
    rows = cells[(cells["prefill_chunk"] > 0) & (cells["n_decode"] > 0)]
    rows = rows.rename(columns=dict(zip((*_CHUNK, *_DECODES), TABLES["mixed"].key, strict=True)))
    linear, tokens = [ops[op].frame for op in LAYER_OPS], rows["chunk_tokens"] + rows["batch_size"]
    measured = tokens <= min(op["num_tokens"].max() for op in linear)
    rows, tokens = rows[measured], tokens[measured]
    around = sum((np.interp(tokens, op["num_tokens"], op["time_us"]) for op in linear), 0.0)
    whole = merged(rows.assign(time_us=rows["time_us"] + around))
    origin = f"linear ops of {DENSE} + one call of {ATTENTION}"
    return Measurements(
        hardware=f"{meta.get('gpu')}; {meta.get('model')}, vLLM {meta.get('vllm_version')}, "
        f"CUDA {meta.get('cuda_version')}",
        dtype=_DTYPES[meta["variant"]],
        ops={**ops, "mixed": OpRows(whole, origin, "combined")},
        profiled=str(meta.get("profiled_at")),
    )


def _check(where: Path, meta: dict[str, Any], model: ModelSpec, device: DeviceSpec) -> None:
    if _plain(device.name) != _plain(hardware := str(meta.get("hardware"))):
        raise BundleError(f"{where}: was measured on {hardware}, not on {device.name}")
    if (variant := meta.get("variant")) not in _DTYPES:
        allowed = ", ".join(_DTYPES)
        raise BundleError(f"{where}: variant {variant!r} is not modelled: must be one of {allowed}")
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


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def is_perf(folder: Path) -> bool:
    """Whether the folder is one of ``profiler/perf``."""
    return (folder / META).is_file() and any(folder.glob(f"**/{DENSE}"))


def perf_meta(folder: Path) -> dict[str, Any]:
    """The metadata of the folder."""
    return dict(read_mapping(folder / META))


def degree_folder(folder: Path, tp: int) -> Path:
    """Where the tables of ``tp`` ranks are. Raises BundleError where these were not measured."""
    here = folder / f"tp{tp}" if (folder / f"tp{tp}").is_dir() else folder
    degrees = perf_meta(folder).get("tp_degrees", [1])
    if tp not in degrees or (here == folder and degrees != [tp]):
        raise BundleError(f"{folder / META}: tp_degrees {degrees}: --tp {tp} was not measured")
    return here


def op_rows(here: Path, op: str, layers: dict[str, int] | None = None) -> OpRows:
    """One of our ops (num_tokens, time_us), the sum of ``layers`` (default: its own) at the sizes
    that all of them have."""
    name, column = (BY_SEQUENCE, "sequences") if OPS[op].outputs else (DENSE, "tokens")
    rows = read_measurements(
        here / name,
        labels=("layer",),
        counts=(column,),
        times=("time_us",),
    )
    summed = layers or LAYERS[op]
    parts = []
    for layer, times in summed.items():
        mine = rows[rows["layer"] == layer]
        if mine.empty:
            there = ", ".join(sorted(set(rows["layer"])))
            raise BundleError(f"{here / name}: no rows of {layer}; there are {there}")
        parts.append(times * mine.groupby(column)["time_us"].median())
    total = sum(parts[1:], parts[0]).dropna().rename_axis("num_tokens")
    return sum_of(total.rename("time_us").reset_index(), summed, f"of {name}")


def attention_cells(here: Path) -> pd.DataFrame:
    """Every call of ``attention.csv``."""
    return read_measurements(here / ATTENTION, from_zero=(*_CHUNK, *_DECODES), times=("time_us",))


def alone(cells: pd.DataFrame, sizes: dict[str, str]) -> pd.DataFrame:
    """Calls over a chunk alone or over decodes alone: these ``sizes``, by their new names."""
    chunks, decodes = cells["prefill_chunk"] > 0, cells["n_decode"] > 0
    only = chunks & ~decodes if "prefill_chunk" in sizes else decodes & ~chunks
    return merged(cells[only][[*sizes, "time_us"]].rename(columns=sizes))


def llmservingsim_gemm(datasets: Path) -> pd.DataFrame:
    """A6000 fp16 GEMMs of Llama-3.1-8B at every token count 1..2048 (unfused projections)."""
    path, time = source_folder(datasets, A6000) / _GEMMS, "latency(ns)"
    raw = read_measurements(
        path, labels=("layer_name",), counts=("input",), times=(time,), keep={"tp_size": 1}
    )
    raw = raw[raw["layer_name"].isin([*_WIDTHS])]
    n, k = (raw["layer_name"].map(sizes) for sizes in (_WIDTHS, _DEPTHS))
    return tidy(raw[time] / 1e3, m=raw["input"], n=n, k=k)


def llmservingsim_attention(datasets: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A6000 flash attention, 32 query and 8 KV heads: (prefill, decode)."""
    path = source_folder(datasets, A6000) / _A6000_ATTENTION
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    rows = attention_rows(path, "prefill")
    chunk, cached = rows["size"], rows["cached"]
    for row in rows.index[cached < chunk]:
        raise BundleError(
            f"{path}: row {row}: kv_cache_size {cached[row]} is less than the chunk of "
            f"{chunk[row]} that it must include"
        )
    prefill = tidy(
        rows["time_us"],
        chunk=chunk,
        context=cached - chunk,
        batch=1,
        **heads,
    )
    rows = attention_rows(path, "decode")
    context = rows["cached"] // rows["size"]
    decode = tidy(rows["time_us"], batch=rows["size"], context=context, **heads)
    return prefill, decode[decode["context"] >= 1].reset_index(drop=True)
