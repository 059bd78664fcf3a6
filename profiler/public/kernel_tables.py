"""aiconfigurator's parquet tables of single kernels as tidy frames, ``time_us`` in microseconds.

They lie under ``aiconfigurator/<system>/<family>/<stack>/<version>/``; the newest version that has
a table comes first. Traps heeded: milliseconds; sizes of messages are ELEMENTS of 2 bytes; the
context of a decode is ``step + isl``, per sequence; windows are other kernels, and asked for by
their length; the time of dynamic quantisation is in TensorRT-LLM's fp8 rows (:func:`quantisation`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.tables import BundleError
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import KvDtype, MoeDtype, WeightDtype
from sarathi_sim.profiler.public.measured_csv import merged, source_folder
from sarathi_sim.profiler.storage.files import regular
from sarathi_sim.profiler.storage.strict import show

FOLDER = "aiconfigurator"
#: The tables' names of our devices, and their L2 in MiB (data sheets): a table's loop finds weights
#: there that a layer left.
SYSTEMS = {
    "a100-80g-sxm": ("a100_sxm", 40),
    "h100-80g-sxm": ("h100_sxm", 50),
    "h200-sxm": ("h200_sxm", 50),
    "b200-sxm": ("b200_sxm", 126),
    "b300-sxm": ("b300_sxm", 126),
    "gb200": ("gb200", 126),
    "l40s": ("l40s", 96),
    "rtx-pro-6000": ("rtx_pro_6000_server", 128),
}
#: The tables that are read, and where they lie.
FORMS = (
    "AIConfigurator's parquet tables (SYSTEM/FAMILY/STACK/VERSION/TABLE.parquet): gemm_perf, "
    "computescale_perf, scale_matrix_perf, context_attention_perf, generation_attention_perf, "
    "context_mla_perf, generation_mla_perf, mla_context_module_perf, mla_generation_module_perf, "
    "dsa_context_module_perf, dsa_generation_module_perf, gdn_perf, moe_perf, "
    "custom_allreduce_perf, nccl_perf, wideep_moe_perf, wideep_context_moe_perf, "
    "wideep_generation_moe_perf, wideep_deepep_ll_perf, wideep_deepep_normal_perf, "
    "wideep_generation_mla_perf, trtllm_alltoall_perf"
)
#: The tables' names of number formats, if they differ from ours.
_THEIRS = {"bf16": "bfloat16"}
_HALF = 2
_MOE = {
    "hidden_size": "hidden",
    "inter_size": "inter",
    "topk": "top_k",
    "num_experts": "experts",
    "moe_tp_size": "tp",
    "moe_ep_size": "ep",
    "num_tokens": "tokens",
}
#: Ranks that divide the experts of a layer, at most.
MOST_RANKS = 16
_HEADS = {"num_heads": "heads", "num_key_value_heads": "kv_heads"}


def gemms(
    datasets: Path, device: str, stack: str, dtype: WeightDtype
) -> Iterator[tuple[pd.DataFrame, str]]:
    """GEMM rows (m, n, k, time_us) and the stack's version, of every one that has some."""
    for path in _versions(datasets, device, "gemm", stack, "gemm_perf"):
        rows = _read(path, ("m", "n", "k"), {"gemm_dtype": _THEIRS.get(dtype, dtype)})
        if len(rows):
            yield merged(rows), path.parent.name


UNLIKE = {
    ("vllm", "0.14.0", "fp8"): "with dynamic quantisation: 31 % of the peak for long prompts, "
    "0.24.0 without it 50 to 63",
    ("vllm", "0.19.0", "fp8"): "with dynamic quantisation, or another kernel: 30 % of the peak for "
    "long prompts, 0.24.0 40",
    ("vllm", "0.14.0", "fp8_block"): "not DeepGEMM, which 0.24.0 names (28 % of the peak for long "
    "prompts, DeepGEMM 60)",
}
"""GEMMs of other kernels than the engine's server runs: the difference."""


def gemm_kernel(datasets: Path, device: str, stack: str, dtype: WeightDtype, version: str) -> str:
    """The published names of the kernels that a version's table of GEMMs times; empty without."""
    import pyarrow.parquet as pq

    engine = stack.partition("@")[0]
    (path,) = _versions(datasets, device, "gemm", f"{engine}@{version}", "gemm_perf")
    chosen = {"gemm_dtype": _THEIRS.get(dtype, dtype)}
    if "kernel_source" not in pq.read_schema(regular(path)).names:
        return ""
    return ", ".join(sorted(set(_read(path, (), chosen, ("kernel_source",))["kernel_source"])))


def quantisation(datasets: Path, device: str, stack: str) -> pd.DataFrame | None:
    """Dynamic quantisation of ``m x k`` activations to fp8: finding the scale, and scaling."""
    parts = []
    for table in ("computescale_perf", "scale_matrix_perf"):
        found = _versions(datasets, device, "quantize", stack, table)
        if not found:
            return None
        parts.append(_read(found[0], ("m", "k"), {}, zero=True))
    return pd.concat(parts).groupby(["m", "k"])[["time_us"]].sum().reset_index()


def static_quantisation(datasets: Path, device: str, stack: str) -> pd.DataFrame | None:
    """Scaling ``m x k`` activations to fp8 by a known factor: one elementwise kernel."""
    found = _versions(datasets, device, "quantize", stack, "scale_matrix_perf")
    return merged(_read(found[0], ("m", "k"), {})) if found else None


def prefill(
    datasets: Path, device: str, stack: str, kv_dtype: KvDtype, window: int = 0
) -> tuple[pd.DataFrame, str] | None:
    """Causal attention of ``batch`` equal sequences without a prefix: batch, chunk, heads,
    kv_heads, head_dim.

    ``window``: attention within the last ``window`` tokens (0: over all).
    With an fp8 cache the kernel that computes in fp8 counts, where the stack has one.
    """
    columns = ("batch_size", "isl", "step", *_HEADS, "head_dim")
    for path in _versions(datasets, device, "attention", stack, "context_attention_perf"):
        for attention in ("fp8", "bfloat16") if kv_dtype == "fp8" else ("bfloat16",):
            chosen = {"kv_cache_dtype": _THEIRS.get(kv_dtype, kv_dtype), "attn_dtype": attention}
            rows = _read(path, columns, {**chosen, "step": 0}, window=window)
            if (rows["batch_size"] == 1).any():
                names = {**_HEADS, "isl": "chunk", "batch_size": "batch"}
                return merged(rows.drop(columns="step").rename(columns=names)), path.parent.name
    return None


def decode(
    datasets: Path, device: str, stack: str, kv_dtype: KvDtype, window: int = 0
) -> tuple[pd.DataFrame, str] | None:
    """Attention of one new token a sequence: batch, context, heads, kv_heads, head_dim."""
    columns = ("batch_size", "isl", "step", *_HEADS, "head_dim")
    for path in _versions(datasets, device, "attention", stack, "generation_attention_perf"):
        chosen = {"kv_cache_dtype": _THEIRS.get(kv_dtype, kv_dtype), "attn_dtype": "bfloat16"}
        rows = _read(path, columns, chosen, window=window)
        if len(rows):
            rows = rows.assign(context=rows["step"] + rows["isl"]).drop(columns=["step", "isl"])
            rows = rows.rename(columns={**_HEADS, "batch_size": "batch"})
            return merged(rows), path.parent.name
    return None


def latent(
    datasets: Path, device: str, stack: str, kind: str, kv_dtype: KvDtype, whole: bool = False
) -> tuple[pd.DataFrame, str] | None:
    """Latent attention of ``prefill`` (heads, chunk) or ``decode`` (heads, batch, context).

    The attention kernel alone or the ``whole`` block of DeepSeek V3 with its bf16 GEMMs.
    """
    name = {"prefill": "context", "decode": "generation"}[kind]
    table = f"mla_{name}_module_perf" if whole else f"{name}_mla_perf"
    chosen: dict[str, Any] = {"kv_cache_dtype": _THEIRS.get(kv_dtype, kv_dtype)}
    chosen |= {"mla_dtype": "bfloat16"} | ({"gemm_type": "bfloat16"} if whole else {})
    chosen |= {"batch_size": 1, "step": 0} if kind == "prefill" else {}
    for path in _versions(datasets, device, "mla", stack, table):
        rows = _read(path, ("num_heads", "batch_size", "isl", "step"), chosen)
        if not len(rows):
            continue
        rows = rows.rename(columns={"num_heads": "heads", "batch_size": "batch", "isl": "chunk"})
        rows["context"] = rows.pop("step") + rows["chunk"]
        unused = ["batch", "context"] if kind == "prefill" else ["chunk"]
        return merged(rows.drop(columns=unused)), path.parent.name
    return None


def latent_blocks(datasets: Path, device: str, stack: str) -> tuple[pd.DataFrame, str] | None:
    """Whole blocks of latent attention with GEMMs in fp8 blocks (heads, batch, context): SGLang's
    decodes with data-parallel attention by FlashAttention 3, its default on Hopper."""
    chosen = {"kernel_source": "fa3", "mla_dtype": "fp8_block", "step": 0}
    for path in _versions(datasets, device, "mla", stack, "wideep_generation_mla_perf"):
        rows = _read(path, ("num_heads", "batch_size", "isl"), chosen)
        if len(rows):
            names = {"num_heads": "heads", "batch_size": "batch", "isl": "context"}
            return merged(rows.rename(columns=names)), path.parent.name
    return None


def sparse(
    datasets: Path,
    device: str,
    stack: str,
    kind: str,
    kv_dtype: KvDtype,
    architecture: str,
    dtype: WeightDtype,
) -> tuple[pd.DataFrame, str] | None:
    """Whole blocks of sparse attention with their indexer and their GEMMs in ``dtype``: of
    ``prefill`` (heads, chunk, context: cached tokens; one sequence) or ``decode`` (heads, batch,
    context)."""
    name = {"prefill": "context", "decode": "generation"}[kind]
    for path in _versions(datasets, device, "sparse_attention", stack, f"dsa_{name}_module_perf"):
        chosen: dict[str, Any] = {"kv_cache_dtype": _THEIRS.get(kv_dtype, kv_dtype)}
        chosen |= {"architecture": architecture, "op_name": f"dsa_{name}_module"}
        chosen |= {"gemm_type": _THEIRS.get(dtype, dtype)}
        chosen |= {"batch_size": 1} if kind == "prefill" else {}
        rows = _read(path, ("num_heads", "batch_size", "isl", "step"), chosen)
        if not len(rows):
            continue
        rows = rows.rename(columns={"num_heads": "heads", "step": "context"})
        if kind == "prefill":
            rows = rows.rename(columns={"isl": "chunk"}).drop(columns="batch_size")
        else:
            rows = rows.assign(context=rows["context"] + rows.pop("isl"))
            rows = rows.rename(columns={"batch_size": "batch"})
        return merged(rows), path.parent.name
    return None


def recurrent(
    datasets: Path, device: str, stack: str, kind: str
) -> tuple[pd.DataFrame, str] | None:
    """Convolution and state of a gated delta net, heads of 128 x 128 numbers: heads (of values),
    kv_heads (of keys), batch, and of ``prefill`` the chunk."""
    phase = {"prefill": "context", "decode": "generation"}[kind]
    counts = ("batch_size", "seq_len", "num_v_heads", "num_k_heads")
    for path in _versions(datasets, device, "linear_attention", stack, "gdn_perf"):
        chosen = {"phase": phase, "head_k_dim": 128, "head_v_dim": 128, "d_conv": 4}
        rows = _read(path, counts, chosen, keep=("kernel_source",))
        each = rows.groupby([*counts, "kernel_source"])["time_us"].min().reset_index()
        whole = each.groupby(list(counts))["time_us"].agg(["size", "sum"]).reset_index()
        whole = whole[whole.pop("size") == 2].rename(  # both kernels
            columns={
                "batch_size": "batch", "seq_len": "chunk", "num_v_heads": "heads",
                "num_k_heads": "kv_heads", "sum": "time_us",
            }
        )  # fmt: skip
        if len(whole):
            return whole, path.parent.name
    return None


def experts(
    datasets: Path,
    device: str,
    stack: str,
    dtype: MoeDtype,
    distribution: str,
    gated: bool = True,
    wide: bool = False,
) -> tuple[pd.DataFrame, str] | None:
    """A mixture's experts on one rank: hidden, inter, top_k, experts, tp, ep, tokens.

    Ranks that divide either the experts' width or their number, up to :data:`MOST_RANKS`. Experts
    with a gate, or those without: Nemotron 3's. Left out are those with another activation, and
    DeepSeek-V3's balanced rows of vLLM and SGLang: its gate sends their tokens to four of eight
    groups of experts. Where two kernels were timed, the faster counts: an engine tunes.
    ``wide``: on more ranks than that, which share whole experts; TensorRT-LLM's ``WIDEEP`` kernels
    are among them.
    """
    for path in _versions(datasets, device, "moe", stack, "moe_perf"):
        chosen = {"moe_dtype": _THEIRS.get(dtype, dtype), "distribution": distribution}
        rows = _read(path, tuple(_MOE), chosen, keep=("kernel_source",)).rename(columns=_MOE)
        kernel = rows.pop("kernel_source").astype(str)
        other, ungated = kernel.str.contains("situ"), kernel.str.contains("nongated")
        ungated |= (rows["top_k"] == 22) | (rows["hidden"] == 2688)  # Nemotron 3, in every stack
        if distribution == "balanced" and not stack.startswith("trtllm"):
            other |= (rows["hidden"] == 7168) & (rows["inter"] == 2048) & (rows["experts"] == 256)
        ranks = rows["tp"] * rows["ep"]
        one_way = (rows["tp"] == 1) | (rows["ep"] == 1)
        chosen_ranks = (ranks > MOST_RANKS) & (rows["tp"] == 1) if wide else ranks <= MOST_RANKS
        rows = rows[~other & (ungated != gated) & one_way & chosen_ranks]
        own = even_experts(datasets, device, stack, dtype, distribution, False) if wide else None
        if own is not None and gated:
            rows = pd.concat([rows, own[0][own[0]["ep"] > MOST_RANKS]])
        if len(rows):
            sizes = [column for column in rows.columns if column != "time_us"]
            return rows.groupby(sizes)["time_us"].min().reset_index(), path.parent.name
    return None


def even_experts(
    datasets: Path, device: str, stack: str, dtype: MoeDtype, distribution: str, even: bool = True
) -> tuple[pd.DataFrame, str] | None:
    """Experts of TensorRT-LLM's wide expert parallelism, as :func:`experts`; ``tokens`` are those
    of all ranks. ``even``: placed by a load balancer, their number that of the slots, copies
    included; else one slot an expert, as they come."""
    for path in _versions(datasets, device, "moe", stack, "wideep_moe_perf"):
        chosen = {"moe_dtype": _THEIRS.get(dtype, dtype)}
        chosen["distribution"] = distribution + ("_eplb" if even else "")
        rows = _read(path, (*_MOE, "num_slots"), chosen).rename(columns=_MOE)
        rows["experts"] = rows.pop("num_slots")
        if len(rows):
            return rows, path.parent.name
    return None


def deepep_experts(
    datasets: Path, device: str, stack: str, kind: str, distribution: str
) -> tuple[pd.DataFrame, str] | None:
    """Experts behind DeepEP (DeepGEMM, fp8 in blocks), as :func:`experts`: masked GEMMs of the
    ``low_latency`` mode or those of ``normal``, which were timed with their launches. ``tokens``
    are those of all ranks."""
    name = {"low_latency": "generation", "normal": "context"}[kind]
    for path in _versions(datasets, device, "moe", stack, f"wideep_{name}_moe_perf")[:1]:
        chosen = {"moe_dtype": "fp8_block"}
        chosen["distribution"] = "uniform" if distribution == "balanced" else distribution
        rows = _read(path, tuple(_MOE), chosen).rename(columns=_MOE)
        return rows.groupby([*_MOE.values()])["time_us"].min().reset_index(), path.parent.name
    return None


#: Columns of DeepEP's tables by mode. Its default is to use so many multiprocessors.
_DEEPEP = {
    "low_latency": ("ll", ("dispatch_avg_t_us", "combine_avg_t_us")),
    "normal": ("normal", tuple(
        f"{part}_{what}_us" for part in ("dispatch", "combine") for what in ("transmit", "notify")
    )),
}  # fmt: skip
_DEEPEP_SMS = 20


def deepep(
    datasets: Path, device: str, stack: str, kind: str, between_nodes: bool
) -> tuple[pd.DataFrame, str] | None:
    """DeepEP's dispatch in fp8 and combine in bf16 (hidden, top_k, experts, ranks, tokens of one
    rank, time_us) in ``low_latency`` or ``normal`` mode: within a node, or between nodes."""
    name, latency = _DEEPEP[kind]
    counts = ("hidden_size", "num_topk", "num_experts", "node_num", "num_token")
    sms = {"dispatch_sms": _DEEPEP_SMS, "combine_sms": _DEEPEP_SMS} if kind == "normal" else {}
    for path in _versions(datasets, device, "comm", stack, f"wideep_deepep_{name}_perf"):
        rows = _read(path, counts, sms, times=latency)
        rows = rows[(rows["node_num"] > 1) == between_nodes]
        if len(rows):
            sizes = [*_EXCHANGE]
            rows["node_num"] *= load_device(device).gpus_per_node
            rows = rows.set_axis([*sizes, "time_us"], axis=1)
            return rows.groupby(sizes)["time_us"].min().reset_index(), path.parent.name
    return None


_EXCHANGE = ("hidden", "top_k", "experts", "ranks", "tokens")
#: TensorRT-LLM's exchanges over NVLink. Combining sends bf16 whatever is dispatched.
_NVLINK = {"nvlink_one_sided": "NVLinkOneSided", "nvlink_two_sided": "NVLinkTwoSided"}


def nvlink_exchange(
    datasets: Path, device: str, stack: str, kernel: str, part: str, dtype: MoeDtype
) -> tuple[pd.DataFrame, str] | None:
    """A ``part`` (prepare, dispatch, combine) of TensorRT-LLM's exchange of tokens in ``dtype``, as
    :func:`deepep`."""
    counts = ("hidden_size", "topk", "num_experts", "moe_ep_size", "num_tokens")
    for path in _versions(datasets, device, "comm", stack, "trtllm_alltoall_perf"):
        chosen = {"kernel_source": _NVLINK[kernel], "op_name": f"alltoall_{part}"}
        rows = _read(path, counts, chosen | {"moe_dtype": _THEIRS.get(dtype, dtype)})
        if len(rows):
            rows = rows.set_axis([*_EXCHANGE, "time_us"], axis=1)
            return rows.groupby([*_EXCHANGE])["time_us"].min().reset_index(), path.parent.name
    return None


def all_to_alls(
    datasets: Path, device: str, op: str = "alltoall"
) -> tuple[pd.DataFrame, str] | None:
    """NCCL's all-to-all (gpus, num_bytes, time_us): all bytes that a rank sends, also to itself.

    Of another ``op``, ``all_gather`` or ``reduce_scatter``: the bytes of all ranks together."""
    for path in _versions(datasets, device, "comm", "nccl", "nccl_perf")[:1]:
        chosen = {"op_name": op, "nccl_dtype": "half"}
        rows = _read(path, ("num_gpus", "message_size"), chosen)
        if len(rows):
            return _messages(rows), path.parent.name
    return None


def all_reduces(datasets: Path, device: str, stack: str) -> dict[str, tuple[pd.DataFrame, str]]:
    """All-reduce rows (gpus, num_bytes, time_us) by kernel, each with its version.

    ``graph`` and ``eager`` are the stack's own (one kernel for both in TensorRT-LLM); ``nccl``.
    """
    found = {}
    for path in _versions(datasets, device, "comm", stack, "custom_allreduce_perf")[:1]:
        rows = _read(path, ("num_gpus", "message_size"), {}, keep=("kernel_source",))
        kernel = rows.pop("kernel_source").astype(str)
        for variant in ("graph", "eager"):
            own = stack.startswith("trtllm")  # SGLang 0.5.6's table holds TensorRT-LLM's kernel
            mine = rows[kernel.str.endswith(variant) | ((kernel == "TRTLLM") & own)]
            if len(mine):
                found[variant] = _messages(mine), path.parent.name
    nccl = [] if "@" in stack else _versions(datasets, device, "comm", "nccl", "nccl_perf")[:1]
    for path in nccl:
        chosen = {"op_name": "all_reduce", "nccl_dtype": "half"}
        rows = _read(path, ("num_gpus", "message_size"), chosen)
        found["nccl"] = _messages(rows), path.parent.name
    return found


def _messages(rows: pd.DataFrame) -> pd.DataFrame:
    sizes = _HALF * rows["message_size"]
    return merged(rows.assign(num_bytes=sizes, gpus=rows["num_gpus"]).drop(
        columns=["message_size", "num_gpus"]
    ))  # fmt: skip


def _versions(datasets: Path, device: str, family: str, stack: str, table: str) -> list[Path]:
    """The files of one table, newest version first; of one version only where that is named
    (``vllm@0.14.0``)."""
    root = source_folder(datasets, FOLDER) / SYSTEMS[device][0]
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder among the public measurements")
    engine, _, version = stack.partition("@")
    found = (root / family / engine).glob(f"{version or '*'}/{table}.parquet")
    return sorted(found, key=lambda path: _numbers(path.parent.name), reverse=True)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _read(
    path: Path,
    counts: tuple[str, ...],
    chosen: dict[str, Any],
    keep: tuple[str, ...] = (),
    window: int | None = None,
    zero: bool = False,
    times: tuple[str, ...] = (),
) -> pd.DataFrame:
    """``counts``, ``keep`` and ``time_us`` of the rows with these values.

    ``times`` are columns in microseconds, whose sum it is; without, it is the ``latency`` in
    milliseconds.

    ``window``: only rows with this one (0: with none), where the table knows windows; a table that
    does not holds rows with none. ``zero``: a time may be 0.
    """
    import pyarrow.parquet as pq

    try:
        has = set(pq.read_schema(regular(path)).names)
        filters: list[tuple[str, str, Any]] = [(k, "==", value) for k, value in chosen.items()]
        if window is not None and "window_size" in has:
            filters.append(("window_size", "==", window))
        timed = times or ("latency",)
        for column in (*counts, *keep, *timed, *chosen):
            if column not in has:
                raise BundleError(f"{path}: column {column!r} is missing; has {show(sorted(has))}")
        if window and "window_size" not in has:
            filters.append((counts[0], "<", 0))  # none
        rows = pd.read_parquet(path, columns=[*counts, *keep, *timed], filters=filters or None)
    except (OSError, ValueError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path}: not a parquet table: {error}") from None
    for column in (*counts, *timed):
        if not pd.api.types.is_numeric_dtype(rows[column]):
            raise BundleError(f"{path}: column {column!r} holds {rows[column].dtype}")
    time_us = (1.0 if times else 1e3) * rows[[*timed]].astype(np.float64).sum(axis=1, skipna=False)
    rows = rows.drop(columns=[*timed])
    wrong = ~np.isfinite(time_us) | (time_us < 0) | ((time_us == 0) & (not zero))
    if wrong.any():
        at = int(np.argmax(np.asarray(wrong)))
        raise BundleError(
            f"{path}: a latency must be positive, got {time_us.iloc[at] / 1e3} ms at "
            + ", ".join(f"{column}={rows[column].iloc[at]}" for column in counts)
        )
    return rows.astype(dict.fromkeys(counts, np.int64)).assign(time_us=time_us)
