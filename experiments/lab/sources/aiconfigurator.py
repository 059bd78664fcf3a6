"""aiconfigurator's tables of single kernels: the parquet files, and CSVs of an A100's.

Tables lie under ``aiconfigurator/<system>/<family>/<stack>/<version>/``; the newest version that
has a table comes first. Traps: times are milliseconds; sizes of messages are ELEMENTS of 2 bytes;
the context of a decode is ``step + isl``, per sequence (``step`` in the CSVs); windows are other
kernels; the time of dynamic quantisation is in TensorRT-LLM's fp8 rows (:func:`quantisation`); some
rows are so fast that their data came from L2; a CSV holds several frameworks, of which one is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_sim.profiler.bundle.tables import BundleError, numbers, refuse, whole_numbers
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.formats import KvDtype, MoeDtype, WeightDtype
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.kernels.wide_times import MOST_RANKS
from sarathi_sim.profiler.storage.files import regular
from sarathi_sim.profiler.storage.strict import show
from .measurements import Measurements, OpRows, check_device, merged, source_folder, tidy, timed

FOLDER = "aiconfigurator"
#: The tables' names of our devices.
SYSTEMS = {
    "a100-80g-sxm": "a100_sxm", "h100-80g-sxm": "h100_sxm", "h200-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm", "b300-sxm": "b300_sxm", "gb200": "gb200", "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
UNLIKE = {
    ("vllm", "0.14.0", "fp8"): "with dynamic quantisation: 31 % of the peak for long prompts, "
    "0.24.0 without it 50 to 63",
    ("vllm", "0.19.0", "fp8"): "with dynamic quantisation, or another kernel: 30 % of the peak for "
    "long prompts, 0.24.0 40",
    ("vllm", "0.14.0", "fp8_block"): "not DeepGEMM, which 0.24.0 names (28 % of the peak for long "
    "prompts, DeepGEMM 60)",
}
"""GEMMs of other kernels than the engine's server runs: the difference."""
Table = tuple[pd.DataFrame, str]
"""Rows, and the stack's version."""
Published = tuple[Path, str, str]
"""Where tables are from: the folder of all measurements, the device, the stack."""
_KERNEL, _HALF = "kernel_source", 2
#: Our names of the tables' columns.
_ATTENTION = {
    "batch_size": "batch", "isl": "chunk", "step": "context", "num_heads": "heads",
    "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
}  # fmt: skip
_BLOCK = {key: _ATTENTION[key] for key in ("num_heads", "batch_size", "isl", "step")}
_MOE = {
    "hidden_size": "hidden", "inter_size": "inter", "topk": "top_k", "num_experts": "experts",
    "moe_tp_size": "tp", "moe_ep_size": "ep", "num_tokens": "tokens",
}  # fmt: skip
_MESSAGE = {"num_gpus": "gpus", "message_size": "num_bytes"}
#: Their names of number formats and phases, if they differ from ours.
_THEIRS = {"bf16": "bfloat16", "prefill": "context", "decode": "generation"}


def _theirs(name: str) -> str:
    return _THEIRS.get(name, name)


def gemms(of: Published, dtype: WeightDtype) -> Iterator[Table]:
    """GEMM rows (m, n, k, time_us) of every version that has some, newest first."""
    names, chosen = {"m": "m", "n": "n", "k": "k"}, {"gemm_dtype": _theirs(dtype)}
    return _tables(of, "gemm/gemm_perf", names, chosen)


def gemm_kernel(of: Published, dtype: WeightDtype, version: str) -> str:
    """The published names of the kernels that a version's table of GEMMs times; empty without."""
    named = f"{of[2].partition('@')[0]}@{version}"
    (path,) = _versions((*of[:2], named), "gemm/gemm_perf")
    if _KERNEL not in _columns(path):
        return ""
    return ", ".join(
        sorted(
            {
                *_read(
                    path,
                    [_KERNEL],
                    {"gemm_dtype": _theirs(dtype)},
                )[_KERNEL]
            }
        )
    )


def quantisation(of: Published) -> pd.DataFrame | None:
    """Dynamic quantisation of ``m x k`` activations to fp8: finding the scale, and scaling."""
    names = ("computescale_perf", "scale_matrix_perf")
    tables = [_versions(of, f"quantize/{name}") for name in names]
    if not all(tables):
        return None
    both = pd.concat([_read(paths[0], ["m", "k"], {}, zero=True) for paths in tables])
    return both.groupby(["m", "k"])[["time_us"]].sum().reset_index()


def static_quantisation(of: Published) -> pd.DataFrame | None:
    """Scaling ``m x k`` activations to fp8 by a known factor: one elementwise kernel."""
    found = _versions(of, "quantize/scale_matrix_perf")
    return merged(_read(found[0], ["m", "k"], {})) if found else None


def prefill(of: Published, kv_dtype: KvDtype, window: int = 0) -> Table | None:
    """Causal attention of ``batch`` equal sequences without a prefix: batch, chunk, heads,
    kv_heads, head_dim; within the last ``window`` tokens (0: over all). With an fp8 cache the
    kernel that computes in fp8 counts, where the stack has one."""
    for path in _versions(of, "attention/context_attention_perf"):
        for kernel in ("fp8", "bfloat16") if kv_dtype == "fp8" else ("bfloat16",):
            chosen = {"kv_cache_dtype": _theirs(kv_dtype), "attn_dtype": kernel, "step": 0}
            rows = _read(path, [*_ATTENTION], chosen, window=window).rename(columns=_ATTENTION)
            if (rows["batch"] == 1).any():
                return _without("context")(rows), path.parent.name
    return None


def decode(of: Published, kv_dtype: KvDtype, window: int = 0) -> Table | None:
    """Attention of one new token a sequence: batch, context, heads, kv_heads, head_dim."""
    table = "attention/generation_attention_perf"
    chosen = {"kv_cache_dtype": _theirs(kv_dtype), "attn_dtype": "bfloat16"}
    return _newest(of, table, _ATTENTION, chosen, _decodes, window=window)


def _decodes(rows: pd.DataFrame) -> pd.DataFrame:
    """By the context that holds the new token."""
    context = rows["context"] + rows["chunk"]
    return merged(rows.drop(columns=["chunk", "context"]).assign(context=context))


def _without(*columns: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda rows: merged(rows.drop(columns=[*columns]))


def latent(of: Published, kind: str, kv_dtype: KvDtype, whole: bool = False) -> Table | None:
    """Latent attention of ``prefill`` (heads, chunk) or ``decode`` (heads, batch, context): the
    kernel alone, or the ``whole`` block of DeepSeek V3 with its bf16 GEMMs."""
    table = f"mla/mla_{_theirs(kind)}_module_perf" if whole else f"mla/{_theirs(kind)}_mla_perf"
    chosen: dict[str, Any] = {"kv_cache_dtype": _theirs(kv_dtype), "mla_dtype": "bfloat16"}
    chosen |= {"gemm_type": "bfloat16"} if whole else {}
    chosen |= {"batch_size": 1, "step": 0} if kind == "prefill" else {}
    change = _decodes if kind == "decode" else _without("batch", "context")
    return _newest(of, table, _BLOCK, chosen, change)


def latent_blocks(of: Published) -> Table | None:
    """Whole blocks of latent attention with GEMMs in fp8 blocks (heads, batch, context): SGLang's
    decodes with data-parallel attention by FlashAttention 3, its default on Hopper."""
    names = {"num_heads": "heads", "batch_size": "batch", "isl": "context"}
    chosen = {_KERNEL: "fa3", "mla_dtype": "fp8_block", "step": 0}
    return _newest(of, "mla/wideep_generation_mla_perf", names, chosen)


def sparse(
    of: Published, kind: str, kv_dtype: KvDtype, architecture: str, dtype: WeightDtype
) -> Table | None:
    """Whole blocks of sparse attention with indexer and GEMMs in ``dtype``: ``prefill`` of one
    sequence (heads, chunk, context: cached tokens), or ``decode`` (heads, batch, context)."""
    name = f"dsa_{_theirs(kind)}_module"
    chosen: dict[str, Any] = {"kv_cache_dtype": _theirs(kv_dtype), "gemm_type": _theirs(dtype)}
    chosen |= {"architecture": architecture, "op_name": name}
    chosen |= {"batch_size": 1} if kind == "prefill" else {}
    table = f"sparse_attention/{name}_perf"
    return _newest(of, table, _BLOCK, chosen, _decodes if kind == "decode" else _without("batch"))


def recurrent(of: Published, kind: str) -> Table | None:
    """Convolution and state of a gated delta net, heads of 128 x 128 numbers: heads (of values),
    kv_heads (of keys), batch, and of ``prefill`` the chunk."""
    names = {"batch_size": "batch", "seq_len": "chunk", "num_v_heads": "heads"}
    names |= {"num_k_heads": "kv_heads", _KERNEL: "kernel"}
    chosen = {"phase": _theirs(kind), "head_k_dim": 128, "head_v_dim": 128, "d_conv": 4}

    def whole(rows: pd.DataFrame) -> pd.DataFrame:
        """Both kernels."""
        kernels = _fastest(rows).groupby(list(names.values())[:-1])["time_us"]
        both = kernels.agg(["size", "sum"]).reset_index().rename(columns={"sum": "time_us"})
        return both[both.pop("size") == 2]

    return _newest(of, "linear_attention/gdn_perf", names, chosen, whole)


def experts(
    of: Published, dtype: MoeDtype, distribution: str, gated: bool = True, wide: bool = False
) -> Table | None:
    """A mixture's experts on one rank: hidden, inter, top_k, experts, tp, ep, tokens.

    Ranks divide either the experts' width or their number, up to :data:`MOST_RANKS`; on more
    (``wide``) they share whole experts, TensorRT-LLM's ``WIDEEP`` kernels too. Without gates
    (``gated``) are Nemotron 3's. Left out are another activation, and DeepSeek-V3's balanced rows
    of vLLM and SGLang: its gate sends their tokens to four of eight groups of experts. Of two
    kernels the faster counts: an engine tunes.
    """

    def fitting(rows: pd.DataFrame) -> pd.DataFrame:
        kernel = rows.pop("kernel").astype(str)
        other, ungated = kernel.str.contains("situ"), kernel.str.contains("nongated")
        ungated |= (rows["top_k"] == 22) | (rows["hidden"] == 2688)  # Nemotron 3, in every stack
        if distribution == "balanced" and not of[2].startswith("trtllm"):
            other |= (rows["hidden"] == 7168) & (rows["inter"] == 2048) & (rows["experts"] == 256)
        ranks = rows["tp"] * rows["ep"]
        one_way = (rows["tp"] == 1) | (rows["ep"] == 1)
        among = (ranks > MOST_RANKS) & (rows["tp"] == 1) if wide else ranks <= MOST_RANKS
        rows = rows[~other & (ungated != gated) & one_way & among]
        own = even_experts(of, dtype, distribution, False) if wide and gated else None
        if own is not None:
            rows = pd.concat([rows, own[0][own[0]["ep"] > MOST_RANKS]])
        return _fastest(rows)

    chosen = {"moe_dtype": _theirs(dtype), "distribution": distribution}
    return _newest(of, "moe/moe_perf", {**_MOE, _KERNEL: "kernel"}, chosen, fitting)


def even_experts(
    of: Published, dtype: MoeDtype, distribution: str, even: bool = True
) -> Table | None:
    """Experts of TensorRT-LLM's wide expert parallelism, as :func:`experts`; ``tokens`` are those
    of all ranks. ``even``: placed by a load balancer, their number that of the slots with copies.
    """
    names = {**_MOE, "num_slots": "slots"}
    chosen = {"moe_dtype": _theirs(dtype), "distribution": distribution + ("_eplb" if even else "")}

    def slots(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(experts=rows.pop("slots"))

    return _newest(of, "moe/wideep_moe_perf", names, chosen, slots)


def deepep_experts(of: Published, kind: str, distribution: str) -> Table | None:
    """Experts behind DeepEP (DeepGEMM, fp8 in blocks), as :func:`experts`: masked GEMMs in mode
    ``low_latency``, or in ``normal`` with their launches. ``tokens`` are those of all ranks."""
    phase = {"low_latency": "generation", "normal": "context"}[kind]
    spread = "uniform" if distribution == "balanced" else distribution
    chosen = {"moe_dtype": "fp8_block", "distribution": spread}
    return _newest(of, f"moe/wideep_{phase}_moe_perf", _MOE, chosen, _fastest)


def deepep(of: Published, kind: str, between_nodes: bool) -> Table | None:
    """DeepEP's dispatch in fp8 and combine in bf16 (hidden, top_k, experts, ranks, tokens of one
    rank, time_us) in ``low_latency`` or ``normal`` mode: within a node, or between nodes."""
    name, parts, sms = "ll", ["avg_t"], {}
    if kind == "normal":  # its default is to use 20 multiprocessors
        name, parts = "normal", ["transmit", "notify"]
        sms = {"dispatch_sms": 20, "combine_sms": 20}
    names = {"hidden_size": "hidden", "num_topk": "top_k", "num_experts": "experts"}
    names |= {"node_num": "ranks", "num_token": "tokens"}
    times = tuple(f"{what}_{part}_us" for what in ("dispatch", "combine") for part in parts)

    def exchanges(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows[(rows["ranks"] > 1) == between_nodes]
        return _fastest(rows.assign(ranks=rows["ranks"] * load_device(of[1]).gpus_per_node))

    table = f"comm/wideep_deepep_{name}_perf"
    return _newest(of, table, names, sms, exchanges, times=times)


def nvlink_exchange(of: Published, kernel: str, part: str, dtype: MoeDtype) -> Table | None:
    """A ``part`` (prepare, dispatch, combine) of TensorRT-LLM's exchange of tokens in ``dtype``, as
    :func:`deepep`. Combining sends bf16 whatever is dispatched."""
    names = {"hidden_size": "hidden", "topk": "top_k", "num_experts": "experts"}
    names |= {"moe_ep_size": "ranks", "num_tokens": "tokens"}
    theirs = {"nvlink_one_sided": "NVLinkOneSided", "nvlink_two_sided": "NVLinkTwoSided"}[kernel]
    chosen = {_KERNEL: theirs, "op_name": f"alltoall_{part}", "moe_dtype": _theirs(dtype)}
    return _newest(of, "comm/trtllm_alltoall_perf", names, chosen, _fastest)


def all_to_alls(of: Published, op: str = "alltoall") -> Table | None:
    """NCCL's all-to-all (gpus, num_bytes, time_us): all bytes that a rank sends, also to itself; of
    another ``op``, ``all_gather`` or ``reduce_scatter``, the bytes of all ranks together."""
    chosen = {"op_name": op, "nccl_dtype": "half"}
    return _newest((*of[:2], "nccl"), "comm/nccl_perf", _MESSAGE, chosen, _messages)


def all_reduces(of: Published) -> dict[str, Table]:
    """All-reduce rows (gpus, num_bytes, time_us) and their version by kernel: ``graph`` and
    ``eager`` are the stack's own (one kernel for both in TensorRT-LLM); ``nccl``."""
    found, names = {}, {**_MESSAGE, _KERNEL: "kernel"}
    if own := _newest(of, "comm/custom_allreduce_perf", names, {}, lambda rows: rows):
        kernel = own[0]["kernel"].astype(str)
        # SGLang 0.5.6's table holds TensorRT-LLM's kernel.
        both = (kernel == "TRTLLM") & of[2].startswith("trtllm")
        for variant in ("graph", "eager"):
            mine = own[0][kernel.str.endswith(variant) | both]
            if len(mine):
                found[variant] = _messages(mine), own[1]
    nccl = None if "@" in of[2] else all_to_alls(of, "all_reduce")
    return found if nccl is None else {**found, "nccl": nccl}


def _messages(rows: pd.DataFrame) -> pd.DataFrame:
    return tidy(rows["time_us"], num_bytes=_HALF * rows["num_bytes"], gpus=rows["gpus"])


def _fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per distinct size."""
    sizes = [column for column in rows.columns if column != "time_us"]
    return rows.groupby(sizes)["time_us"].min().reset_index()


def _newest(*table: Any, **how: Any) -> Table | None:
    """The first of :func:`_tables`."""
    return next(_tables(*table, **how), None)


def _tables(
    of: Published,
    table: str,
    names: Mapping[str, str],
    chosen: Mapping[str, Any],
    change: Callable[[pd.DataFrame], pd.DataFrame] = merged,
    **how: Any,
) -> Iterator[Table]:
    """The rows (:func:`_read`), with columns by our ``names`` and after a ``change``, in every
    version ``of`` a device's stack that has some, newest first."""
    for path in _versions(of, table):
        rows = change(_read(path, [*names], chosen, **how).rename(columns=dict(names)))
        if len(rows):
            yield rows, path.parent.name


def _versions(of: Published, table: str) -> list[Path]:
    """The files of one table (``family/name``), newest first; of a named version (``vllm@0.14.0``)
    only."""
    root = source_folder(of[0], FOLDER) / SYSTEMS[of[1]]
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder among the public measurements")
    (family, name), (engine, _, version) = table.split("/"), of[2].partition("@")
    found = (root / family / engine).glob(f"{version or '*'}/{name}.parquet")
    return sorted(
        found, key=lambda path: [*map(int, re.findall(r"\d+", path.parent.name))], reverse=True
    )


def _columns(path: Path) -> set[str]:
    import pyarrow.parquet as pq

    return set(pq.read_schema(regular(path)).names)


def _read(
    path: Path,
    columns: list[str],
    chosen: Mapping[str, Any],
    window: int | None = None,
    zero: bool = False,
    times: tuple[str, ...] = (),
) -> pd.DataFrame:
    """The ``columns`` and ``time_us`` of the rows with the ``chosen`` values: the sum of ``times``
    in microseconds, else ``latency`` in milliseconds. ``window``: only rows with this one (0: with
    none); a table without this column has rows with none. ``zero``: a time may be 0."""
    timed, counts = [*(times or ("latency",))], [name for name in columns if name != _KERNEL]
    try:
        has = _columns(path)
        filters = [(column, "==", value) for column, value in chosen.items()]
        if window is not None and "window_size" in has:
            filters.append(("window_size", "==", window))
        elif window:
            filters.append((counts[0], "<", 0))  # none
        if missing := [name for name in (*columns, *timed, *chosen) if name not in has]:
            raise BundleError(f"{path}: column {missing[0]!r} is missing; has {show(sorted(has))}")
        rows = pd.read_parquet(path, columns=[*columns, *timed], filters=filters or None)
    except BundleError:
        raise
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: not a parquet table: {error}") from None
    took = sum(numbers(rows[name], path) for name in timed)
    refuse(took < 0 if zero else took <= 0, rows[timed[0]], path, "a latency must be positive")
    sizes = {name: whole_numbers(rows[name], path, 0) for name in counts}
    return rows[columns].assign(**sizes, time_us=(1.0 if times else 1e3) * took)


A100, A100_DEVICE = "aiconfigurator_a100_sxm", "a100-80g-sxm"
_GEMM, _NCCL = "gemm_bf16.csv", "nccl_collectives.csv"
_PREFILL, _DECODE = "attention_prefill_bf16.csv", "attention_decode_bf16.csv"
FILES = f"{_GEMM}, attention_{{prefill,decode}}_bf16.csv and {_NCCL} of an A100"
#: Of HBM bandwidth: decode rows above it were read from L2.
_HBM_SHARE = 0.9


def measured_on(_: Path) -> str:
    """The CSVs' device."""
    return A100_DEVICE


def measurements(folder: Path, model: ModelSpec, tp: int, device: DeviceSpec) -> Measurements:
    """One rank of ``model`` from the A100's CSVs. Decodes are TensorRT-LLM's for MHA and vLLM's for
    GQA, for the reasons given in the device model; prompts vLLM's, of more than 64 heads SGLang's.
    Raises BundleError for another device."""
    here = source_folder(folder, A100)
    check_device("aiconfigurator", here, A100_DEVICE, device)
    if (folder / FOLDER).is_dir() and not (here / _GEMM).is_file():
        raise BundleError(
            f"{folder}: of aiconfigurator this holds the parquet tables ({FOLDER}/), which a run "
            f"with stack asks; the CSVs of {A100}/ are read here"
        )
    (heads, kv_heads), ops, attention = model.heads_per_rank(tp), {}, {}
    gemm = OpRows(aic_gemm(folder), f"{_GEMM}, SGLang")
    if (here / _PREFILL).is_file():
        framework = "VLLM" if heads <= 64 else "SGLang"
        rows = aic_prefill(folder, framework)
        attention["attn_prefill"] = OpRows(rows[rows["batch"] == 1], f"{_PREFILL}, {framework}")
    if (here / _DECODE).is_file():
        framework = "TRTLLM" if heads == kv_heads else "VLLM"
        rows = from_memory(aic_decode(folder, framework), device)
        left_out = f"rows above {100 * _HBM_SHARE:.0f} % of HBM bandwidth left out"
        attention["attn_decode"] = OpRows(rows, f"{_DECODE}, {framework}, {left_out}")
    if tp > 1 and (here / _NCCL).is_file() and len(rows := aic_all_reduce(folder, tp)):
        ops["all_reduce"] = OpRows(rows, f"{_NCCL}, {tp} GPUs, half")
    versions = "GEMM SGLang 0.5.10, attention vLLM 0.14.0 and TensorRT-LLM 1.0.0, NCCL 2.27.3"
    return Measurements(f"NVIDIA A100-SXM4-80GB; {versions}", "bfloat16", ops, gemm, attention)


def aic_gemm(datasets: Path, framework: str = "SGLang") -> pd.DataFrame:
    """A100-SXM bf16 GEMMs: m, n, k, time_us of one serving framework."""
    sizes = ("m", "n", "k")
    rows = _csv(datasets, _GEMM, counts=sizes, keep={"framework": framework})
    return merged(rows[[*sizes, "time_us"]])


def aic_prefill(datasets: Path, framework: str = "VLLM") -> pd.DataFrame:
    """A100-SXM causal attention without cached context; heads are per GPU."""
    return merged(_attention_csv(datasets, _PREFILL, framework).assign(context=0))


def aic_decode(datasets: Path, framework: str = "VLLM") -> pd.DataFrame:
    """A100-SXM decode attention; context (``step``) is per sequence, before the new token."""
    return merged(_attention_csv(datasets, _DECODE, framework).drop(columns="chunk"))


def from_memory(decodes: pd.DataFrame, device: DeviceSpec) -> pd.DataFrame:
    """Without the rows whose keys and values, read once in their time, came from L2."""
    kv_bytes = 4 * decodes[["head_dim", "kv_heads", "batch", "context"]].prod(axis=1)
    return decodes[1e6 * kv_bytes / decodes["time_us"] <= _HBM_SHARE * device.memory_bandwidth]


def _attention_csv(datasets: Path, file: str, framework: str) -> pd.DataFrame:
    counts = [name for name in _ATTENTION if name != "step"]
    raw = _csv(datasets, file, counts=counts, from_zero=("step",), keep={"framework": framework})
    return raw.rename(columns=_ATTENTION)[[*_ATTENTION.values(), "time_us"]]


def aic_all_reduce(datasets: Path, gpus: int) -> pd.DataFrame:
    """NCCL all-reduce on NVLink. Sizes are ELEMENTS in the file: 2 bytes each for half."""
    keep = {"op_name": "all_reduce", "nccl_dtype": "half", "num_gpus": gpus}
    raw = _csv(datasets, _NCCL, counts=("message_size_elements",), keep=keep)
    return tidy(raw["time_us"], num_bytes=_HALF * raw["message_size_elements"])


def _csv(datasets: Path, file: str, **columns: Any) -> pd.DataFrame:
    return timed(source_folder(datasets, A100) / file, "latency_ms", **columns)
