"""Vidur's profiles: per-op times of whole models on A100 and A40, attention on one A100 rank.

The reader handles these traps: times are milliseconds; gate and up are one GEMM of 2 x ffn / tp
columns; a token count may occur twice; ``add`` runs twice a layer; kv_cache_size is before the
chunk, and per sequence; messages are bytes; a tensor-parallel rank sends its share only; ranks
spread over nodes are in the same files as ranks of one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import SENDS
from .measurements import (
    Measurements,
    OpRows,
    merged,
    read_measurements,
    source_folder,
    sum_of,
    tidy,
    timed,
)

FOLDER = "vidur"
FILES = (
    "Vidur's CSVs: mlp_{a100,a40}_MODEL.csv, attention_a100_CodeLlama-34b_tp2.csv, all_reduce_* "
    "and p2p_*"
)
_ATTENTION = "attention_a100_CodeLlama-34b_tp2.csv"
_SHAPE = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd")
_HEADS = {"heads": 32, "kv_heads": 4, "head_dim": 128}
_TP = "num_tensor_parallel_workers"
_SECOND_NORM = "post_attention_layernorm"
_A40_REDUCES = "all_reduce_a40.csv"
_P2P, _SEND_A40 = "p2p_a100_{}_2023_n_embd_not_12288.csv", "send_recv_a40.csv"
_MESSAGES = {"a100": ("all_reduce_a100_dgx.csv", _P2P), "a40": (_A40_REDUCES, _SEND_A40)}
#: Our ops as sums of Vidur's, each so many times. mlp_up_proj is gate and up fused in gated models.
OPS: dict[str, dict[str, int]] = {
    "preproj": {"attn_pre_proj": 1},
    "postproj": {"attn_post_proj": 1},
    "ffn_ln1": {"mlp_up_proj": 1},
    "ffn_ln2": {"mlp_down_proj": 1},
    "embedding": {"emb": 1},
    "others": {"input_layernorm": 1, _SECOND_NORM: 1, "attn_rope": 1, "mlp_act": 1, "add": 2},
}


def measured_on(_: Path) -> str:
    """The device of most files."""
    return "a100-80g-sxm"


def measurements(folder: Path, model: ModelSpec, tp: int, device: DeviceSpec) -> Measurements:
    """One rank of ``model``, which is found by its architecture. The first part of the device's
    name (``a100``, ``a40``) is that of the files' names. Raises FileNotFoundError without any."""
    gpu, here = device.name.split("-")[0], _file(folder)
    if not (files := _files(folder, gpu)):
        there = sorted({path.stem.split("_")[1] for path in here.glob("mlp_*_*.csv")})
        raise FileNotFoundError(
            f"vidur: {here} has no mlp_{gpu}_MODEL.csv, so nothing was measured on {device.name}; "
            f"devices there: {', '.join(there) or 'none'}"
        )
    ops: dict[str, OpRows] = {}
    for name, path in files.items():
        raw = _read_mlp(path)
        row, shape = raw.iloc[0], (model.num_heads, model.num_kv_heads, model.hidden_size)
        gated = str(row["use_gated_mlp"]).lower() == "true"
        same = (*shape, model.ffn_hidden_size) == tuple(row[[*_SHAPE]]) and gated == model.gated_ffn
        if same and not model.learned_positions:
            ops = _ops(raw[raw[_TP] == tp], f"of {name}, tp {tp}")
            break
    attention = {}
    if gpu == "a100" and (here / _ATTENTION).is_file():
        rows = {"attn_prefill": prefill(folder), "attn_decode": decode(folder)}
        origin = f"{_ATTENTION} (paged FlashAttention)"
        attention = {op: OpRows(frame, origin) for op, frame in rows.items()}
    return Measurements(
        hardware=f"NVIDIA {gpu.upper()}, as the repository has it",
        dtype="float16",
        ops=ops | _messages(folder, gpu, tp),
        gemms=OpRows(mlp(folder, gpu)["gemm"], f"mlp_{gpu}_*.csv"),
        attention=attention,
    )


def _ops(raw: pd.DataFrame, of: str) -> dict[str, OpRows]:
    """The ops of one model at one degree, as far as its file has their parts."""
    ops, tokens = {}, raw["num_tokens"]
    for op, parts in OPS.items():
        if len(raw) and all(_median(part) in raw for part in parts):
            total_ms = sum((n * raw[_median(part)] for part, n in parts.items()), 0.0 * tokens)
            ops[op] = sum_of(tidy(1e3 * total_ms, num_tokens=tokens), parts, of)
    return ops


def _messages(folder: Path, gpu: str, tp: int) -> dict[str, OpRows]:
    """All-reduce inside a node, and point to point, where the folder has the files."""
    reduce, send = _MESSAGES.get(gpu, ("", ""))
    here, found = _file(folder), {}
    if tp > 1 and (here / reduce).is_file():
        found["all_reduce"] = all_reduce(folder, tp, reduce), f"{reduce}, {tp} GPUs of one node"
    for op, scope in SENDS.items():
        file = send.format(scope)
        if (here / file).is_file():
            read = p2p_2023 if gpu == "a100" else send_recv_a40
            found[op] = read(folder, scope), file
    binned = "medians over half octaves, never faster when larger"
    return {
        op: OpRows(half_octaves(rows), f"{origin}; {binned}", "combined")
        for op, (rows, origin) in found.items()
        if len(rows)
    }


def half_octaves(rows: pd.DataFrame) -> pd.DataFrame:
    """Messages (num_bytes, time_us) thinned to two sizes an octave, never faster when larger: the
    medians of half an octave (small ones scatter by a factor of two), and a running maximum."""
    bins = np.floor(2 * np.log2(rows["num_bytes"])).astype(int)
    thin = rows.groupby(bins.to_numpy())[["num_bytes", "time_us"]].median()
    thin["num_bytes"] = thin["num_bytes"].round().astype(int)
    thin["time_us"] = thin["time_us"].cummax()
    return thin.drop_duplicates("num_bytes").reset_index(drop=True)


def _median(op: str) -> str:
    """The column with an op's median, in milliseconds."""
    return f"time_stats.{op}.median"


def _file(datasets: Path, name: str = "") -> Path:
    return source_folder(datasets, FOLDER) / name


def _files(datasets: Path, device: str) -> dict[str, Path]:
    """The MLP files of ``a100`` or ``a40`` by the model's name there, sorted."""
    paths = sorted(_file(datasets).glob(f"mlp_{device}_*.csv"))
    return {path.stem.removeprefix(f"mlp_{device}_"): path for path in paths}


def _read_mlp(path: Path) -> pd.DataFrame:
    """The rows of one MLP file. Token counts may occur twice; phi-2 has one norm."""
    ops = dict.fromkeys(op for parts in (OPS["embedding"], *OPS.values()) for op in parts)
    return read_measurements(
        path,
        labels=("use_gated_mlp",),
        counts=(*_SHAPE, "num_tokens", _TP),
        times=[_median(op) for op in ops if op != _SECOND_NORM],
        optional_times=[_median(_SECOND_NORM)],
    )


def mlp(datasets: Path, device: str) -> dict[str, pd.DataFrame]:
    """The per-token ops of Vidur's MLP files for ``a100`` or ``a40``, by op.

    ``gemm``: m, n, k; gate and up are one GEMM of 2 x ffn / tp columns in gated models. The others:
    num_bytes moved. All with ``model``. ``norm`` is RMSNorm and ``act`` SiLU x up; phi-2 alone has
    ``layer_norm`` and ``act_plain`` (GELU). Its rotary covers part of a head and its ``add`` is two
    additions, so both are left out. The resolution is 1 microsecond.
    """
    parts: dict[str, list[pd.DataFrame]] = {}
    for name, path in _files(datasets, device).items():
        for op, frame in _kernels(_read_mlp(path)).items():
            parts.setdefault(op, []).append(frame.assign(model=name))
    if not parts:
        raise FileNotFoundError(f"{_file(datasets)}: no mlp_{device}_*.csv")
    return {op: merged(pd.concat(frames)) for op, frames in parts.items()}


def gemms_by_tp(datasets: Path, device: str) -> Iterator[pd.DataFrame]:
    """The GEMMs (model, m, n, k, time_us) of one model at one TP degree at a time, as bundled."""
    for name, path in _files(datasets, device).items():
        for _, raw in _read_mlp(path).groupby(_TP):
            yield merged(_kernels(raw.reset_index(drop=True))["gemm"].assign(model=name))


def _kernels(raw: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """GEMMs by shape and streams by the bytes of fp16 numbers moved, of one model's rows."""
    tokens, tp, hidden = raw["num_tokens"], raw[_TP], raw["n_embd"]
    heads, gated = raw["n_head"] // tp, bool(raw["use_gated_mlp"].iloc[0])
    kv_heads = (raw["n_kv_head"] // tp).clip(lower=1)
    head_dim = raw["n_embd"] // raw["n_head"]
    ffn = raw["n_expanded_embd"] // tp
    shapes = {
        "attn_pre_proj": ((heads + 2 * kv_heads) * head_dim, hidden),
        "attn_post_proj": (hidden, heads * head_dim),
        "mlp_up_proj": (ffn * (2 if gated else 1), hidden),
        "mlp_down_proj": (hidden, ffn),
    }
    streams = {"embedding": ("emb", 2 * hidden)}  # numbers read or written a token
    streams["norm" if gated else "layer_norm"] = "input_layernorm", 2 * hidden
    streams["act" if gated else "act_plain"] = "mlp_act", (3 if gated else 2) * ffn
    if gated:
        streams["add"] = "add", 3 * hidden
        streams["rope"] = "attn_rope", 2 * (heads + kv_heads) * head_dim
    gemms = [
        pd.DataFrame(
            {
                "m": tokens,
                "n": n,
                "k": k,
                "time_us": 1e3 * raw[_median(op)],
            }
        )
        for op, (n, k) in shapes.items()
    ]
    return {"gemm": pd.concat(gemms)} | {
        op: pd.DataFrame({"num_bytes": 2 * tokens * numbers, "time_us": 1e3 * raw[_median(theirs)]})
        for op, (theirs, numbers) in streams.items()
    }


def prefill(datasets: Path) -> pd.DataFrame:
    """A100 paged attention of one chunk: 32 query and 4 KV heads, after the cached tokens."""
    rows = attention_rows(_file(datasets, _ATTENTION), "prefill")
    return tidy(
        rows["time_us"],
        chunk=rows["size"],
        context=rows["cached"],
        batch=1,
        **_HEADS,
    )


def decode(datasets: Path) -> pd.DataFrame:
    """A100 paged decode attention: 32 query and 4 KV heads; kv_cache_size is per sequence."""
    rows = attention_rows(_file(datasets, _ATTENTION), "decode")
    return tidy(rows["time_us"], batch=rows["size"], context=rows["cached"], **_HEADS)


def attention_rows(path: Path, kind: str) -> pd.DataFrame:
    """A ``prefill`` or ``decode``: size (of chunk or batch), cached (kv_cache_size as it stands
    there), time_us. Rows keep their number in the file."""
    size = {"prefill": "prefill_chunk_size", "decode": "batch_size"}[kind]
    sizes = {"counts": (size,), "from_zero": ("kv_cache_size",)}
    raw = timed(path, _median(f"attn_{kind}"), **sizes, keep={"is_prefill": kind == "prefill"})
    return raw.rename(columns={size: "size", "kv_cache_size": "cached"})


def _by_bytes(datasets: Path, file: str, op: str, **keep: int) -> pd.DataFrame:
    raw = timed(_file(datasets, file), _median(op), counts=("size",), keep=keep)
    return tidy(raw["time_us"], num_bytes=raw["size"])


def all_reduce(datasets: Path, gpus: int, file: str = _A40_REDUCES) -> pd.DataFrame:
    """All-reduce of ``gpus`` ranks of ONE node: num_bytes, time_us. Sizes are bytes. The files also
    hold ranks that are spread over nodes (fewer devices per node than workers)."""
    return _by_bytes(datasets, file, "all_reduce", num_workers=gpus, devices_per_node=gpus)


def all_reduce_2023(datasets: Path, gpus: int) -> tuple[pd.DataFrame, float]:
    """All-reduces on A100s up to 512 tokens (num_bytes, time_us), each launched by the host; and
    the time of an empty one."""
    path = _file(datasets, "all_reduce_a100_2023_n_embd_not_12288.csv")
    sizes = {"counts": ("num_workers", "n_embd"), "from_zero": ("num_tokens", "rank")}
    raw = timed(path, _median("all_reduce"), **sizes, keep={"num_workers": gpus})
    empty_us = float(raw["time_us"][raw["num_tokens"] == 0].median())
    raw = raw[(raw["num_tokens"] > 0) & (raw["num_tokens"] <= 512)]
    return tidy(raw["time_us"], num_bytes=2 * raw["num_tokens"] * raw["n_embd"]), empty_us


def send_recv_a40(datasets: Path, scope: str) -> pd.DataFrame:
    """A40 point to point; two devices of one node, or one of each of two nodes."""
    devices = 1 + (scope == "intra_node")
    return _by_bytes(datasets, _SEND_A40, "send_recv", devices_per_node=devices)


def p2p_2023(datasets: Path, scope: str) -> pd.DataFrame:
    """A100 point to point, InfiniBand between nodes. A tensor-parallel rank sends its share. Rows
    of zero tokens (launch overhead only) are left out: the payload has no logarithm."""
    path = _file(datasets, _P2P.format(scope))
    sizes = {"counts": ("n_embd", _TP), "from_zero": ("num_tokens", "rank")}
    raw = timed(path, _median("send_recv"), **sizes)
    raw = raw[raw["num_tokens"] > 0]
    return tidy(raw["time_us"], num_bytes=2 * raw["num_tokens"] * raw["n_embd"] // raw[_TP])
