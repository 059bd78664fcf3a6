"""The public measurement files as tidy frames: one row a measurement, ``time_us`` in microseconds.

The column names are those of the physics forms (``profiler/facts/roofline.py``). Each reader says
which trap of its source it heeds. The files themselves are not part of this project;
``data/README.md`` lists their origin and licence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from profiler.public.measured_csv import MeasurementError, merged, read_measurements, source_folder
from profiler.public.vidur_frames import (
    vidur_all_reduce_a40,
    vidur_decode,
    vidur_mlp,
    vidur_p2p_2023,
    vidur_prefill,
    vidur_send_recv_a40,
)

__all__ = [
    "aic_all_reduce",
    "aic_decode",
    "aic_gemm",
    "aic_prefill",
    "llmservingsim_attention",
    "llmservingsim_gemm",
    "vidur_all_reduce_a40",
    "vidur_decode",
    "vidur_mlp",
    "vidur_p2p_2023",
    "vidur_prefill",
    "vidur_send_recv_a40",
]

_AIC = "aiconfigurator_a100_sxm"
_LLMSERVINGSIM = "llmservingsim_a6000"
_AIC_HEADS = ("num_heads", "num_key_value_heads", "head_dim")


def _aic_attention(datasets: Path, kind: str, framework: str) -> pd.DataFrame:
    return read_measurements(
        source_folder(datasets, _AIC) / f"attention_{kind}_bf16.csv",
        labels=("framework",),
        counts=("batch_size", "isl", *_AIC_HEADS),
        from_zero=("step",),
        times=("latency_ms",),
        keep=("framework", framework),
    )


def aic_gemm(datasets: Path, framework: str = "SGLang") -> pd.DataFrame:
    """A100-SXM bf16 GEMMs: m, n, k, time_us of one serving framework."""
    raw = read_measurements(
        source_folder(datasets, _AIC) / "gemm_bf16.csv",
        labels=("framework",),
        counts=("m", "n", "k"),
        times=("latency_ms",),
        keep=("framework", framework),
    )
    return merged(raw[["m", "n", "k"]].assign(time_us=1e3 * raw["latency_ms"]))


def aic_prefill(datasets: Path, framework: str = "VLLM") -> pd.DataFrame:
    """A100-SXM causal attention without cached context; heads are per GPU."""
    raw = _aic_attention(datasets, "prefill", framework)
    return merged(
        pd.DataFrame(
            {
                "batch": raw["batch_size"],
                "chunk": raw["isl"],
                "context": 0,
                "heads": raw["num_heads"],
                "kv_heads": raw["num_key_value_heads"],
                "head_dim": raw["head_dim"],
                "time_us": 1e3 * raw["latency_ms"],
            }
        )
    )


def aic_decode(datasets: Path, framework: str = "VLLM") -> pd.DataFrame:
    """A100-SXM decode attention; context (``step``) is per sequence, before the new token."""
    raw = _aic_attention(datasets, "decode", framework)
    return merged(
        pd.DataFrame(
            {
                "batch": raw["batch_size"],
                "context": raw["step"],
                "heads": raw["num_heads"],
                "kv_heads": raw["num_key_value_heads"],
                "head_dim": raw["head_dim"],
                "time_us": 1e3 * raw["latency_ms"],
            }
        )
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
    return merged(
        pd.DataFrame(
            {"num_bytes": 2 * raw["message_size_elements"], "time_us": 1e3 * raw["latency_ms"]}
        )
    )


def llmservingsim_gemm(datasets: Path) -> pd.DataFrame:
    """A6000 fp16 GEMMs of Llama-3.1-8B at every token count 1..2048 (unfused projections)."""
    raw = read_measurements(
        source_folder(datasets, _LLMSERVINGSIM) / "layers_Llama-3.1-8B_tp1.csv",
        labels=("layer_name",),
        counts=("input", "tp_size"),
        times=("latency(ns)",),
    )
    raw = raw[raw["tp_size"] == 1]
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
    raw = raw[raw["layer_name"].isin(list(shapes))]
    frame = pd.DataFrame(
        {
            "m": raw["input"],
            "n": raw["layer_name"].map({name: n for name, (n, _) in shapes.items()}),
            "k": raw["layer_name"].map({name: k for name, (_, k) in shapes.items()}),
            "time_us": raw["latency(ns)"] / 1e3,
        }
    )
    return merged(frame)


def llmservingsim_attention(datasets: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A6000 flash attention, 32 query and 8 KV heads: (prefill, decode).

    kv_cache_size INCLUDES the chunk in prefill rows, and is the TOTAL of the batch in decode rows.
    """
    path = source_folder(datasets, _LLMSERVINGSIM) / "attention_Llama-3.1-8B_tp1.csv"
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128}

    def rows(kind: str, is_prefill: bool, count: str) -> pd.DataFrame:
        raw = read_measurements(
            path,
            counts=(count,),
            from_zero=("kv_cache_size",),
            times=(f"time_stats.{kind}.median",),
            keep=("is_prefill", is_prefill),
        )
        return raw.rename(columns={count: "count", f"time_stats.{kind}.median": "time_ms"})

    first = rows("attn_prefill", True, "prefill_chunk_size")
    context = first["kv_cache_size"] - first["count"]
    if (context < 0).any():
        at = int(np.argmax(context.to_numpy() < 0))
        raise MeasurementError(
            f"{path}: row {first.index[at]}: kv_cache_size {first['kv_cache_size'].iloc[at]} is "
            f"less than the chunk of {first['count'].iloc[at]} that it must include"
        )
    prefill = pd.DataFrame({"chunk": first["count"], "context": context, "batch": 1})
    second = rows("attn_decode", False, "batch_size")
    context = second["kv_cache_size"] // second["count"]
    decode = pd.DataFrame({"batch": second["count"], "context": context})
    prefill["time_us"], decode["time_us"] = 1e3 * first["time_ms"], 1e3 * second["time_ms"]
    return merged(prefill.assign(**heads)), merged(decode[context >= 1].assign(**heads))
