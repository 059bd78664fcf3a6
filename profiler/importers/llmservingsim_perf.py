"""LLMServingSim's ``profiler/perf`` folders: vLLM's own kernels, op by op.

A folder of one model holds ``meta.yaml`` and, beside it or below ``tp<k>/``, ``dense.csv`` (ops by
tokens, one layer), ``per_sequence.csv`` (ops by sequences) and ``attention.csv``: a chunk of
``prefill_chunk`` tokens after ``kv_prefill`` cached ones, in one call with ``n_decode`` decodes of
``kv_decode`` tokens each.

The reader handles these traps: times are microseconds; a layer has two norms, and the file has the
time of one; the kernels were launched one by one (``enforce_eager``), so times hold no launches.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from profiler.bundle.schema import TABLES, Bundle, BundleError
from profiler.facts.device import DeviceSpec, list_devices
from profiler.facts.model import ModelSpec
from profiler.facts.ops import DECODE, LAYER_OPS, OPS, PREFILL
from profiler.importers.assemble import Publication, assemble
from profiler.importers.part import Kind, Part
from profiler.physics.modelled import rounded_us
from profiler.physics.study import LLMSERVINGSIM, Origin
from profiler.public.measured_csv import merged, read_measurements
from profiler.storage.plain_yaml import read_mapping

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
_DTYPES: dict[str, Literal["float16", "bfloat16"]] = {"bf16": "bfloat16", "fp16": "float16"}
_SIZES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
}


def is_perf(folder: Path) -> bool:
    """Whether the folder has this form."""
    return (folder / META).is_file() and any(folder.glob(f"**/{DENSE}"))


def device_of(folder: Path) -> str:
    """The shipped device that the profile was measured on. Raises BundleError where none is."""
    hardware = str(_meta(folder).get("hardware"))
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
    meta = _meta(folder)
    _check(folder, meta, model, device)
    here = folder / f"tp{tp}" if (folder / f"tp{tp}").is_dir() else folder
    degrees = meta.get("tp_degrees", [1])
    if tp not in degrees or (here == folder and degrees != [tp]):
        raise BundleError(f"{folder / META}: tp_degrees {degrees}: --tp {tp} was not measured")
    dense = read_measurements(
        here / DENSE, labels=("layer",), counts=("tokens",), times=("time_us",)
    ).rename(columns={"tokens": "num_tokens"})
    by_sequence = read_measurements(
        here / BY_SEQUENCE, labels=("layer",), counts=("sequences",), times=("time_us",)
    ).rename(columns={"sequences": "num_tokens"})
    parts = {
        op: _part(here / BY_SEQUENCE, by_sequence, layers)
        if OPS[op].outputs
        else _part(here / DENSE, dense, layers)
        for op, layers in LAYERS.items()
    }
    cells = read_measurements(
        here / ATTENTION,
        from_zero=("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"),
        times=("time_us",),
    )
    chunks, decodes = cells["prefill_chunk"] > 0, cells["n_decode"] > 0
    parts[PREFILL] = _alone(cells[chunks & ~decodes], PREFILL, ("prefill_chunk", "kv_prefill"))
    parts[DECODE] = _alone(cells[decodes & ~chunks], DECODE, ("n_decode", "kv_decode"))
    bundle = assemble(_publication(meta), device, model, tp, parts)
    mixed = _mixed(cells[chunks & decodes], parts)
    about = bundle.meta.environment | {"mixed": mixed.mark()}
    meta_of_all = dataclasses.replace(bundle.meta, environment=about)
    return dataclasses.replace(bundle, meta=meta_of_all, mixed=mixed.rows)


def _meta(folder: Path) -> dict[str, Any]:
    return dict(read_mapping(folder / META))


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
    engine = meta.get("engine_effective")
    sizes = engine.get("hf_overrides") if isinstance(engine, dict) else None
    for theirs, ours in _SIZES.items():
        size = sizes.get(theirs) if isinstance(sizes, dict) else None
        if size != getattr(model, ours):
            raise BundleError(
                f"{where}: {theirs} of {meta.get('model')} is {size}, but {model.name} has "
                f"{getattr(model, ours)}: give the model that was measured"
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


def _part(path: Path, rows: pd.DataFrame, layers: dict[str, int]) -> Part:
    """One of our ops: the sum of its layers, at the sizes that all of them have."""
    total: pd.Series[float] | None = None
    for layer, times in layers.items():
        mine = rows[rows["layer"] == layer].groupby("num_tokens")["time_us"].median()
        if mine.empty:
            there = ", ".join(sorted(set(rows["layer"])))
            raise BundleError(f"{path}: no rows of {layer}; there are {there}")
        total = times * mine if total is None else (total + times * mine).dropna()
    assert total is not None
    summed = " + ".join(f"{n} x {name}" if n > 1 else name for name, n in layers.items())
    kind: Kind = "measured" if list(layers.values()) == [1] else "combined"
    return Part(total.rename("time_us").reset_index(), kind, f"{summed} of {path.name}")


def _alone(cells: pd.DataFrame, op: str, sizes: tuple[str, str]) -> Part:
    """Attention of one chunk, or of decodes alone."""
    rows = cells[[*sizes, "time_us"]].rename(columns=dict(zip(sizes, OPS[op].columns, strict=True)))
    return Part(merged(rows), "measured", f"rows of {ATTENTION} with nothing else in the call")


def _mixed(cells: pd.DataFrame, parts: dict[str, Part]) -> Part:
    """Whole layers of a chunk and decodes: their linear ops, and the attention of both as one."""
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    rows = cells.rename(columns=dict(zip(names, TABLES["mixed"].key, strict=True)))
    tokens = rows["chunk_tokens"] + rows["batch_size"]
    linear = [parts[op].rows for op in LAYER_OPS]
    measured = tokens <= min(op["num_tokens"].max() for op in linear)
    rows, tokens = rows[measured], tokens[measured]
    around = sum((np.interp(tokens, op["num_tokens"], op["time_us"]) for op in linear), 0.0)
    whole = merged(rows.assign(time_us=rows["time_us"] + around))
    whole["time_us"] = rounded_us(whole["time_us"].to_numpy())
    return Part(whole, "combined", f"linear ops of {DENSE} + one call of {ATTENTION}")
