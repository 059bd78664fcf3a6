"""The public measurement files as tidy frames: one row a measurement, ``time_us`` in microseconds.

The column names are those of the physics forms (``profiler/facts/roofline.py``). Each reader names
the trap of its source that it handles. The files themselves are not part of this project;
``data/README.md`` lists their origin and licence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.tables import BundleError
from sarathi_sim.profiler.public.measured_csv import read_measurements, source_folder, tidy
from sarathi_sim.profiler.public.vidur_frames import attention_rows

_AIC = "aiconfigurator_a100_sxm"
_LLMSERVINGSIM = "llmservingsim_a6000"


def aic_gemm(datasets: Path, framework: str = "SGLang") -> pd.DataFrame:
    """A100-SXM bf16 GEMMs: m, n, k, time_us of one serving framework."""
    raw = read_measurements(
        source_folder(datasets, _AIC) / "gemm_bf16.csv",
        labels=("framework",),
        counts=("m", "n", "k"),
        times=("latency_ms",),
        keep=("framework", framework),
    )
    return tidy(1e3 * raw["latency_ms"], m=raw["m"], n=raw["n"], k=raw["k"])


def aic_prefill(datasets: Path, framework: str = "VLLM") -> pd.DataFrame:
    """A100-SXM causal attention without cached context; heads are per GPU."""
    return _aic_attention(datasets, "prefill", framework)


def aic_decode(datasets: Path, framework: str = "VLLM") -> pd.DataFrame:
    """A100-SXM decode attention; context (``step``) is per sequence, before the new token."""
    return _aic_attention(datasets, "decode", framework)


def _aic_attention(datasets: Path, kind: str, framework: str) -> pd.DataFrame:
    raw = read_measurements(
        source_folder(datasets, _AIC) / f"attention_{kind}_bf16.csv",
        labels=("framework",),
        counts=("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"),
        from_zero=("step",),
        times=("latency_ms",),
        keep=("framework", framework),
    )
    sizes = {"context": raw["step"]}
    if kind == "prefill":
        sizes = {"chunk": raw["isl"], "context": 0 * raw["step"]}
    return tidy(
        1e3 * raw["latency_ms"],
        batch=raw["batch_size"],
        **sizes,
        heads=raw["num_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
    )


def aic_all_reduce(datasets: Path, gpus: int) -> pd.DataFrame:
    """NCCL all-reduce on NVLink. Sizes are ELEMENTS in the file: 2 bytes each for half."""
    raw = read_measurements(
        source_folder(datasets, _AIC) / "nccl_collectives.csv",
        labels=("nccl_dtype",),
        counts=("num_gpus", "message_size_elements"),
        times=("latency_ms",),
        keep=("op_name", "all_reduce"),
    )
    raw = raw[(raw["nccl_dtype"] == "half") & (raw["num_gpus"] == gpus)]
    return tidy(1e3 * raw["latency_ms"], num_bytes=2 * raw["message_size_elements"])


def llmservingsim_gemm(datasets: Path) -> pd.DataFrame:
    """A6000 fp16 GEMMs of Llama-3.1-8B at every token count 1..2048 (unfused projections)."""
    raw = read_measurements(
        source_folder(datasets, _LLMSERVINGSIM) / "layers_Llama-3.1-8B_tp1.csv",
        labels=("layer_name",),
        counts=("input", "tp_size"),
        times=("latency(ns)",),
    )
    shapes = {
        "q_proj": (4096, 4096),
        "o_proj": (4096, 4096),
        "k_proj": (1024, 4096),
        "v_proj": (1024, 4096),
        "gate_proj": (14336, 4096),
        "up_proj": (14336, 4096),
        "down_proj": (4096, 14336),
        "lm_head": (128256, 4096),
    }
    raw = raw[(raw["tp_size"] == 1) & raw["layer_name"].isin(list(shapes))]
    n, k = (raw["layer_name"].map({op: s[i] for op, s in shapes.items()}) for i in (0, 1))
    return tidy(raw["latency(ns)"] / 1e3, m=raw["input"], n=n, k=k)


def llmservingsim_attention(datasets: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A6000 flash attention, 32 query and 8 KV heads: (prefill, decode).

    kv_cache_size INCLUDES the chunk in prefill rows, and is the TOTAL of the batch in decode rows.
    """
    path = source_folder(datasets, _LLMSERVINGSIM) / "attention_Llama-3.1-8B_tp1.csv"
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    chunk, cached, time_us = attention_rows(path, "prefill")
    context = cached - chunk
    if (context < 0).any():
        at = int(np.argmax(context.to_numpy() < 0))
        raise BundleError(
            f"{path}: row {chunk.index[at]}: kv_cache_size {cached.iloc[at]} is less than the "
            f"chunk of {chunk.iloc[at]} that it must include"
        )
    prefill = tidy(time_us, chunk=chunk, context=context, batch=1, **heads)
    batch, cached, time_us = attention_rows(path, "decode")
    decode = tidy(time_us, batch=batch, context=cached // batch, **heads)
    return prefill, decode[decode["context"] >= 1].reset_index(drop=True)
