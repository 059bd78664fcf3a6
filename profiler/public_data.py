"""The public measurement files as tidy frames: one row a measurement, ``time_us`` in microseconds.

The column names are those of the physics forms (``profiler/roofline.py``). Each reader says which
trap of its source it heeds. The files themselves are not part of this project; ``data/README.md``
lists their origin and licence.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

_AIC = "aiconfigurator_a100_sxm"


def _read(datasets: Path, *parts: str) -> pd.DataFrame:
    path = datasets.joinpath(*parts)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file among the public measurements")
    return pd.read_csv(path)


def _median(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per distinct input: some files hold a point twice."""
    inputs = [c for c in frame.columns if c != "time_us"]
    return frame.groupby(inputs, sort=True)[["time_us"]].median().reset_index()


def aic_gemm(datasets: Path, framework: str = "SGLang") -> pd.DataFrame:
    """A100-SXM bf16 GEMMs: m, n, k, time_us of one serving framework."""
    raw = _read(datasets, _AIC, "gemm_bf16.csv")
    raw = raw[raw["framework"] == framework]
    return _median(raw[["m", "n", "k"]].assign(time_us=1e3 * raw["latency_ms"]))


def aic_prefill(datasets: Path, framework: str = "VLLM") -> pd.DataFrame:
    """A100-SXM causal attention without cached context; heads are per GPU."""
    raw = _read(datasets, _AIC, "attention_prefill_bf16.csv")
    raw = raw[raw["framework"] == framework]
    return _median(
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
    raw = _read(datasets, _AIC, "attention_decode_bf16.csv")
    raw = raw[raw["framework"] == framework]
    return _median(
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
    raw = _read(datasets, _AIC, "nccl_collectives.csv")
    raw = raw[
        (raw["op_name"] == "all_reduce") & (raw["nccl_dtype"] == "half") & (raw["num_gpus"] == gpus)
    ]
    return _median(
        pd.DataFrame(
            {"num_bytes": 2 * raw["message_size_elements"], "time_us": 1e3 * raw["latency_ms"]}
        )
    )


def vidur_mlp(datasets: Path, device: str) -> dict[str, pd.DataFrame]:
    """The per-token ops of Vidur's MLP files for ``a100`` or ``a40``, by op.

    ``gemm``: m, n, k; gate and up are one GEMM of 2 x ffn / tp columns in gated models. The others:
    num_bytes moved. All with ``model``. ``norm`` is RMSNorm and ``act`` SiLU x up; phi-2 alone has
    ``layer_norm`` and ``act_plain`` (GELU). Its rotary covers part of a head and its ``add`` is two
    additions, so both are left out. Token counts that occur twice are merged; the resolution is
    1 microsecond.
    """
    parts: dict[str, list[pd.DataFrame]] = {}
    for path in sorted((datasets / "vidur").glob(f"mlp_{device}_*.csv")):
        for op, frame in _vidur_model(pd.read_csv(path)).items():
            name = path.stem.removeprefix(f"mlp_{device}_")
            parts.setdefault(op, []).append(frame.assign(model=name))
    if not parts:
        raise FileNotFoundError(f"{datasets / 'vidur'}: no mlp_{device}_*.csv")
    return {op: _median(pd.concat(frames)) for op, frames in parts.items()}


def _vidur_model(raw: pd.DataFrame) -> dict[str, pd.DataFrame]:
    tokens, tp, hidden = raw["num_tokens"], raw["num_tensor_parallel_workers"], raw["n_embd"]
    heads, gated = raw["n_head"] // tp, bool(raw["use_gated_mlp"].iloc[0])
    kv_heads = (raw["n_kv_head"] // tp).clip(lower=1)
    head_dim = raw["n_embd"] // raw["n_head"]
    ffn = raw["n_expanded_embd"] // tp
    rotated = (heads + kv_heads) * head_dim

    def median(name: str) -> pd.Series[float]:
        return 1e3 * raw[f"time_stats.{name}.median"]

    def gemm(name: str, n: pd.Series[int], k: pd.Series[int]) -> pd.DataFrame:
        frame = pd.DataFrame({"m": tokens, "n": n, "k": k, "time_us": median(name)})
        return frame.dropna()

    def stream(name: str, numbers: pd.Series[int]) -> pd.DataFrame:
        """``numbers`` fp16 values read or written per token."""
        frame = pd.DataFrame({"num_bytes": 2 * tokens * numbers, "time_us": median(name)})
        return frame[frame["time_us"] > 0].dropna()

    found = {
        "gemm": pd.concat(
            [
                gemm("attn_pre_proj", (heads + 2 * kv_heads) * head_dim, hidden),
                gemm("attn_post_proj", hidden, heads * head_dim),
                gemm("mlp_up_proj", ffn * (2 if gated else 1), hidden),
                gemm("mlp_down_proj", hidden, ffn),
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


def vidur_prefill(datasets: Path) -> pd.DataFrame:
    """A100 paged attention of one chunk: 32 query and 4 KV heads; kv_cache_size is BEFORE it."""
    raw = _read(datasets, "vidur", "attention_a100_CodeLlama-34b_tp2.csv")
    raw = raw[raw["is_prefill"].astype(bool)]
    frame = pd.DataFrame({"chunk": raw["prefill_chunk_size"], "context": raw["kv_cache_size"]})
    frame = frame.assign(batch=1, heads=32, kv_heads=4, head_dim=128)
    return _median(frame.assign(time_us=1e3 * raw["time_stats.attn_prefill.median"]).dropna())


def vidur_decode(datasets: Path) -> pd.DataFrame:
    """A100 paged decode attention: 32 query and 4 KV heads; kv_cache_size is per sequence."""
    raw = _read(datasets, "vidur", "attention_a100_CodeLlama-34b_tp2.csv")
    raw = raw[~raw["is_prefill"].astype(bool)]
    frame = pd.DataFrame({"batch": raw["batch_size"], "context": raw["kv_cache_size"]})
    frame = frame.assign(heads=32, kv_heads=4, head_dim=128)
    return _median(frame.assign(time_us=1e3 * raw["time_stats.attn_decode.median"]).dropna())


def vidur_all_reduce_a40(datasets: Path, gpus: int) -> pd.DataFrame:
    """A40 all-reduce; sizes are bytes."""
    raw = _read(datasets, "vidur", "all_reduce_a40.csv")
    raw = raw[raw["num_workers"] == gpus]
    return _median(
        pd.DataFrame(
            {"num_bytes": raw["size"], "time_us": 1e3 * raw["time_stats.all_reduce.median"]}
        )
    )


def vidur_send_recv_a40(datasets: Path, scope: str) -> pd.DataFrame:
    """A40 point to point; two devices of one node, or one of each of two nodes."""
    raw = _read(datasets, "vidur", "send_recv_a40.csv")
    raw = raw[raw["devices_per_node"] == (2 if scope == "intra_node" else 1)]
    return _median(
        pd.DataFrame(
            {"num_bytes": raw["size"], "time_us": 1e3 * raw["time_stats.send_recv.median"]}
        )
    )


def vidur_p2p_2023(datasets: Path, scope: str) -> pd.DataFrame:
    """A100 point to point, InfiniBand between nodes. A tensor-parallel rank sends its share.

    Rows of zero tokens (launch overhead only) are left out: the payload has no logarithm.
    """
    kind = "inter_node" if scope == "inter_node" else "intra_node"
    raw = _read(datasets, "vidur", f"p2p_a100_{kind}_2023_n_embd_not_12288.csv")
    raw = raw[raw["num_tokens"] > 0]
    payload = 2 * raw["num_tokens"] * raw["n_embd"] // raw["num_tensor_parallel_workers"]
    return _median(
        pd.DataFrame({"num_bytes": payload, "time_us": 1e3 * raw["time_stats.send_recv.median"]})
    )


def llmservingsim_gemm(datasets: Path) -> pd.DataFrame:
    """A6000 fp16 GEMMs of Llama-3.1-8B at every token count 1..2048 (unfused projections)."""
    raw = _read(datasets, "llmservingsim_a6000", "layers_Llama-3.1-8B_tp1.csv")
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
    return _median(frame)


def llmservingsim_attention(datasets: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A6000 flash attention, 32 query and 8 KV heads: (prefill, decode).

    kv_cache_size INCLUDES the chunk in prefill rows, and is the TOTAL of the batch in decode rows.
    """
    raw = _read(datasets, "llmservingsim_a6000", "attention_Llama-3.1-8B_tp1.csv")
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    prefill = raw[raw["is_prefill"].astype(bool)]
    chunk = prefill["prefill_chunk_size"]
    first = pd.DataFrame({"chunk": chunk, "context": prefill["kv_cache_size"] - chunk, "batch": 1})
    first["time_us"] = 1e3 * prefill["time_stats.attn_prefill.median"]
    decode = raw[~raw["is_prefill"].astype(bool)]
    batch = decode["batch_size"]
    second = pd.DataFrame({"batch": batch, "context": decode["kv_cache_size"] // batch})
    second["time_us"] = 1e3 * decode["time_stats.attn_decode.median"]
    second = second[second["context"] >= 1]
    return _median(first.assign(**heads).dropna()), _median(second.assign(**heads).dropna())
