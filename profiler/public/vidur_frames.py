"""Vidur's measurement files as tidy frames; see ``profiler/public/frames.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from sarathi_sim.profiler.public.measured_csv import merged, read_measurements, source_folder, tidy

_ATTENTION = "attention_a100_CodeLlama-34b_tp2.csv"
_SHAPE = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd")
_HEADS = {"heads": 32, "kv_heads": 4, "head_dim": 128}
_TP = "num_tensor_parallel_workers"
#: The ops of one layer that are not GEMMs, with how often each runs in a gated model.
OTHERS = {
    "input_layernorm": 1,
    "post_attention_layernorm": 1,
    "attn_rope": 1,
    "mlp_act": 1,
    "add": 2,
}
#: Our ops and Vidur's GEMMs. mlp_up_proj is gate and up fused in gated models.
GEMMS = {
    "preproj": "attn_pre_proj",
    "postproj": "attn_post_proj",
    "ffn_ln1": "mlp_up_proj",
    "ffn_ln2": "mlp_down_proj",
}


def median_of(op: str) -> str:
    """The column with an op's median, in milliseconds."""
    return f"time_stats.{op}.median"


def files(datasets: Path, device: str) -> dict[str, Path]:
    """The MLP files of ``a100`` or ``a40`` by the model's name there, sorted."""
    prefix = f"mlp_{device}_"
    found = sorted(source_folder(datasets, "vidur").glob(f"{prefix}*.csv"))
    return {path.stem.removeprefix(prefix): path for path in found}


def read_mlp(path: Path) -> pd.DataFrame:
    """The rows of one MLP file, checked. Token counts may occur twice; phi-2 has one norm."""
    second_norm = "post_attention_layernorm"
    ops = ["emb", *GEMMS.values(), *(op for op in OTHERS if op != second_norm)]
    return read_measurements(
        path,
        labels=("use_gated_mlp",),
        counts=(*_SHAPE, "num_tokens", _TP),
        times=[median_of(op) for op in ops],
        optional_times=[median_of(second_norm)],
    )


def mlp(datasets: Path, device: str) -> dict[str, pd.DataFrame]:
    """The per-token ops of Vidur's MLP files for ``a100`` or ``a40``, by op.

    ``gemm``: m, n, k; gate and up are one GEMM of 2 x ffn / tp columns in gated models. The others:
    num_bytes moved. All with ``model``. ``norm`` is RMSNorm and ``act`` SiLU x up; phi-2 alone has
    ``layer_norm`` and ``act_plain`` (GELU). Its rotary covers part of a head and its ``add`` is two
    additions, so both are left out. Token counts that occur twice are merged; the resolution is
    1 microsecond.
    """
    parts: dict[str, list[pd.DataFrame]] = {}
    for name, path in files(datasets, device).items():
        for op, frame in _vidur_model(read_mlp(path)).items():
            parts.setdefault(op, []).append(frame.assign(model=name))
    if not parts:
        folder = source_folder(datasets, "vidur")
        raise FileNotFoundError(f"{folder}: no mlp_{device}_*.csv")
    return {op: merged(pd.concat(frames)) for op, frames in parts.items()}


def gemms_by_tp(datasets: Path, device: str) -> Iterator[pd.DataFrame]:
    """The GEMMs (model, m, n, k, time_us) of one model at one TP degree at a time, as bundled."""
    for name, path in files(datasets, device).items():
        for _, raw in read_mlp(path).groupby(_TP):
            yield merged(_vidur_model(raw.reset_index(drop=True))["gemm"].assign(model=name))


def _vidur_model(raw: pd.DataFrame) -> dict[str, pd.DataFrame]:
    tokens, tp, hidden = raw["num_tokens"], raw[_TP], raw["n_embd"]
    heads, gated = raw["n_head"] // tp, bool(raw["use_gated_mlp"].iloc[0])
    kv_heads = (raw["n_kv_head"] // tp).clip(lower=1)
    head_dim = raw["n_embd"] // raw["n_head"]
    ffn = raw["n_expanded_embd"] // tp
    rotated = (heads + kv_heads) * head_dim

    def gemm(op: str, n: pd.Series[int], k: pd.Series[int]) -> pd.DataFrame:
        time_us = 1e3 * raw[median_of(GEMMS[op])]
        return pd.DataFrame({"m": tokens, "n": n, "k": k, "time_us": time_us})

    def stream(name: str, numbers: pd.Series[int]) -> pd.DataFrame:
        """``numbers`` fp16 values read or written per token."""
        time_us = 1e3 * raw[median_of(name)]
        return pd.DataFrame({"num_bytes": 2 * tokens * numbers, "time_us": time_us})

    found = {
        "gemm": pd.concat(
            [
                gemm("preproj", (heads + 2 * kv_heads) * head_dim, hidden),
                gemm("postproj", hidden, heads * head_dim),
                gemm("ffn_ln1", ffn * (2 if gated else 1), hidden),
                gemm("ffn_ln2", hidden, ffn),
            ]
        ),
        "embedding": stream("emb", 2 * hidden),
    }
    if not gated:
        found["layer_norm"] = stream("input_layernorm", 2 * hidden)
        found["act_plain"] = stream("mlp_act", 2 * ffn)
        return found
    found["norm"] = stream("input_layernorm", 2 * hidden)
    found["act"] = stream("mlp_act", 3 * ffn)
    found["add"] = stream("add", 3 * hidden)
    found["rope"] = stream("attn_rope", 2 * rotated)
    return found


def prefill(datasets: Path) -> pd.DataFrame:
    """A100 paged attention of one chunk: 32 query and 4 KV heads; kv_cache_size is BEFORE it."""
    path = source_folder(datasets, "vidur") / _ATTENTION
    chunk, context, time_us = attention_rows(path, "prefill")
    return tidy(time_us, chunk=chunk, context=context, batch=1, **_HEADS)


def decode(datasets: Path) -> pd.DataFrame:
    """A100 paged decode attention: 32 query and 4 KV heads; kv_cache_size is per sequence."""
    path = source_folder(datasets, "vidur") / _ATTENTION
    batch, context, time_us = attention_rows(path, "decode")
    return tidy(time_us, batch=batch, context=context, **_HEADS)


def attention_rows(
    path: Path, kind: str
) -> tuple[pd.Series[int], pd.Series[int], pd.Series[float]]:
    """Of the rows of a ``prefill`` or ``decode``: chunk or batch, kv_cache_size as it stands
    there, microseconds."""
    count, time = {"prefill": "prefill_chunk_size", "decode": "batch_size"}[kind], f"attn_{kind}"
    raw = read_measurements(
        path,
        counts=(count,),
        from_zero=("kv_cache_size",),
        times=(median_of(time),),
        keep=("is_prefill", kind == "prefill"),
    )
    return raw[count], raw["kv_cache_size"], 1e3 * raw[median_of(time)]


def all_reduce(datasets: Path, file: str, gpus: int) -> pd.DataFrame:
    """All-reduce of ``gpus`` ranks of ONE node: num_bytes, time_us. Sizes are bytes.

    The files also hold ranks that are spread over nodes (fewer devices per node than workers).
    """
    time = median_of("all_reduce")
    raw = read_measurements(
        source_folder(datasets, "vidur") / file,
        counts=("size", "num_workers", "devices_per_node", "max_devices_per_node"),
        times=(time,),
    )
    raw = raw[(raw["num_workers"] == gpus) & (raw["devices_per_node"] == gpus)]
    return tidy(1e3 * raw[time], num_bytes=raw["size"])


def all_reduce_a40(datasets: Path, gpus: int) -> pd.DataFrame:
    """A40 all-reduce; sizes are bytes."""
    return all_reduce(datasets, "all_reduce_a40.csv", gpus)


def all_reduce_2023(datasets: Path, gpus: int) -> tuple[pd.DataFrame, float]:
    """All-reduces on A100s up to 512 tokens (num_bytes, time_us), each launched by the host; and
    the time of an empty one."""
    path = source_folder(datasets, "vidur") / "all_reduce_a100_2023_n_embd_not_12288.csv"
    column = median_of("all_reduce")
    raw = read_measurements(
        path,
        counts=("num_workers", "n_embd"),
        from_zero=("num_tokens", "rank"),
        times=(column,),
        keep=("num_workers", gpus),
    )
    time_us = 1e3 * raw[column]
    some = (raw["num_tokens"] > 0) & (raw["num_tokens"] <= 512)
    num_bytes = 2 * raw["num_tokens"] * raw["n_embd"]
    return tidy(time_us[some], num_bytes=num_bytes[some]), float(
        time_us[raw["num_tokens"] == 0].median()
    )


def send_recv_a40(datasets: Path, scope: str) -> pd.DataFrame:
    """A40 point to point; two devices of one node, or one of each of two nodes."""
    time = median_of("send_recv")
    raw = read_measurements(
        source_folder(datasets, "vidur") / "send_recv_a40.csv",
        counts=("size", "devices_per_node"),
        times=(time,),
    )
    raw = raw[raw["devices_per_node"] == (2 if scope == "intra_node" else 1)]
    return tidy(1e3 * raw[time], num_bytes=raw["size"])


def p2p_2023(datasets: Path, scope: str) -> pd.DataFrame:
    """A100 point to point, InfiniBand between nodes. A tensor-parallel rank sends its share.

    Rows of zero tokens (launch overhead only) are left out: the payload has no logarithm.
    """
    time = median_of("send_recv")
    raw = read_measurements(
        source_folder(datasets, "vidur") / f"p2p_a100_{scope}_2023_n_embd_not_12288.csv",
        counts=("n_embd", _TP),
        from_zero=("num_tokens", "rank"),
        times=(time,),
    )
    raw = raw[raw["num_tokens"] > 0]
    return tidy(1e3 * raw[time], num_bytes=2 * raw["num_tokens"] * raw["n_embd"] // raw[_TP])
