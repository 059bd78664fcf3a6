"""Tables of measured servers, and how each row is simulated.

A row has a deployment, a load, and what was measured: the columns of NVIDIA AIConfigurator's
``silicon_sample.csv``. The load is a closed loop of ``concurrency`` clients with prompts of ``isl``
and outputs of ``osl`` tokens, each between ``length_range_ratio`` and 1 of that. ``latency_ms`` and
``output_tokens_per_s`` are scored, too, where a table has them. A row that cannot be read is
refused alone.

What a row does not say about its engine is stated here, each setting with its source. Nothing is
fitted to the rows, but the settings marked as inferred were found by looking at such rows.

Source: the launch scripts of SemiAnalysis InferenceX (``benchmarks/single_node`` and its older
versions) and its ``perf-changelog.yaml``. What is inferred about rows ``nvidia_gap_*`` is in
docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.inputs import HostConstants, calls_of_layer
from sarathi_sim.profiler.bundle.csv_cells import read_cells
from sarathi_sim.profiler.facts.formats import STACKS
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.public.kernel_tables import SYSTEMS
from sarathi_sim.profiler.storage.strict import did_you_mean, mistakes
from sarathi_sim.simulator.loop.records import Floats

METRICS = ("ttft", "tpot")
"""What every row was measured for, and what constants are fitted to."""
SCORED = {metric: f"{metric}_ms" for metric in (*METRICS, "latency")}
SCORED |= {"throughput": "output_tokens_per_s"}
"""All that is predicted and scored, with its name in tables."""

_Number = TypeVar("_Number", float, Floats)
_Count = Annotated[int, Field(ge=1, le=2**20)]
_Milliseconds = Annotated[float, Field(gt=0, le=1e9)]


class Measured(BaseModel):
    """One server under one load; ``ttft_ms`` and ``tpot_ms`` are means over its requests.

    ``flags`` say why a row is doubtful; ``mode`` is ``agg`` where prefill and decode share GPUs.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Annotated[str, Field(min_length=1, max_length=300)]
    backend: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    system: Annotated[str, Field(min_length=1)]
    isl: _Count
    osl: Annotated[int, Field(ge=2, le=2**20)]  # a single token has no TPOT
    concurrency: _Count
    ttft_ms: _Milliseconds
    tpot_ms: _Milliseconds
    tp: _Count | None = None
    pp: _Count = 1
    dp: _Count = 1
    moe_ep: Annotated[int, Field(ge=0, le=2**20)] = 1
    precision: str = "bf16"
    mode: str = "agg"
    dense: bool = True
    length_range_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    source: str = ""
    backend_version: str = ""
    measured_date: str = ""
    flags: str = ""
    latency_ms: _Milliseconds | None = None
    output_tokens_per_s: Annotated[float, Field(gt=0, le=1e12)] | None = None

    def latency_of(self, ttft_ms: _Number, tpot_ms: _Number) -> _Number:
        """The mean latency of a request in ms that follows from mean TTFT and TPOT."""
        return ttft_ms + (self.osl * (1 + self.length_range_ratio) / 2 - 1) * tpot_ms

    def of(self, metric: str) -> float | None:
        """One of :data:`SCORED`; None where it was not measured. The latency follows from the
        others where the table does not have it."""
        if metric == "latency" and self.latency_ms is None:
            return self.latency_of(self.ttft_ms, self.tpot_ms)
        found: float | None = getattr(self, SCORED[metric])
        return found

    @property
    def concurrency_class(self) -> str:
        """The power of two up to which the concurrency lies, as a group's name."""
        return f"<= {2 ** (self.concurrency - 1).bit_length()}"


@dataclass(frozen=True)
class ServerTimes:
    """Predicted means of TTFT and TPOT in milliseconds, output tokens per second, and ``bands`` of
    90 % by metric: (low, high), in the metric's unit. ``kv_full`` says whether the KV cache was
    full at a time."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float | None = None
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kv_full: bool = False

    def of(self, row: Measured, metric: str) -> float | None:
        """One of :data:`SCORED` for that row; None where it is not predicted."""
        if metric == "latency":
            return row.latency_of(self.ttft_ms, self.tpot_ms)
        found: float | None = getattr(self, SCORED[metric])
        return found


NEEDED = tuple(name for name, field in Measured.model_fields.items() if field.is_required())


def read_measured(path: Path) -> tuple[list[Measured], dict[str, str]]:
    """The rows of a file, and why others are refused, by id (or ``row N`` where it has none).

    Raises ConfigError for a file that is no such table.
    """
    cells = read_cells(path, dtype=str, keep_default_na=False)
    for name in NEEDED:
        if name not in cells.columns:
            close = did_you_mean(name, list(cells.columns))
            raise ConfigError(
                f"{path}: column {name} is missing{close}; needed: {', '.join(NEEDED)}"
            )
    rows: dict[str, Measured] = {}
    refused: dict[str, str] = {}
    for line, cells_of in zip(cells.index, cells.to_dict("records"), strict=True):
        given = {str(name): value for name, value in cells_of.items() if value != ""}
        name = str(given.get("id", f"row {line}"))
        if name in rows or name in refused:
            refused[f"row {line}"] = f"the id {name} is given twice"
            continue
        try:
            rows[name] = Measured.model_validate(given)
        except ValidationError as error:
            refused[name] = "; ".join(mistakes(error, Measured, given, ".".join))
    return list(rows.values()), refused


# How a row is simulated -------------------------------------------------------------------------

DEEPSEEK = ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1")
GPT_OSS, MINIMAX = "openai/gpt-oss-120b", "MiniMaxAI/MiniMax-M2.5"
_IN_BLOCKS = {"fp8": ("fp8_block", "fp8_block"), "fp4": ("nvfp4", "nvfp4")}
#: The shipped model, and the formats of a layer's weights and of its experts by the row's
#: precision. Their fp8 is in blocks; gpt-oss's fp4 is MXFP4.
MIXTURES = {
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", {"fp8": ("fp8_block", "fp8_block")}),
    MINIMAX: ("minimax-m2", _IN_BLOCKS),
    DEEPSEEK[0]: ("deepseek-v3", _IN_BLOCKS),
    DEEPSEEK[1]: ("deepseek-r1", _IN_BLOCKS),
    GPT_OSS: ("gpt-oss-120b", {"fp4": ("bf16", "w4a16_mxfp4")}),
}
#: From this day on InferenceX warms servers up before it measures.
_WARM = "2026-01-21"
_BLACKWELL = ("b200_sxm", "b300_sxm", "gb200")

#: Hugging Face name -> shipped model. InferenceX serves Llama 3.3 under the name of Llama 3.1.
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.3-70b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-405B": "llama-3.1-405b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
}
MODELS |= {name: model for name, (model, _) in MIXTURES.items()}
#: AIConfigurator's system -> shipped device.
DEVICES = {system: device for device, (system, _) in SYSTEMS.items()}
DTYPES = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp4": "nvfp4", "nvfp4": "nvfp4"}

ROUNDS = 10
"""Requests a client sends; both sources' tools (of ``nvidia_gap_*`` inferred)."""
THINK_S = 0.003
"""Seconds in the mean until a client's next request reaches the engine: assumed."""

SGLANG_MEMORY = 0.8
"""SGLang's share of the memory under Dynamo: inferred from one GPU of 80 GB that holds 66 GB of
weights. Its own default would leave room for twice as many requests."""
TRTLLM_MEMORY = 0.75
"""TensorRT-LLM's share of what the weights leave, under Dynamo: inferred from one GPU that serves
Qwen3 32B in fp8, where requests begin to wait between 278 and 295 thousand tokens."""

APART = 0.95
"""The shortest length as a share of the longest where clients have drifted apart: assumed. With
equal lengths they go on in lock-step, as they began."""

DYNAMO = "under dynamo"
_MEMORY = {
    f"sglang {DYNAMO}": {"mem_fraction_static": SGLANG_MEMORY},
    f"trtllm {DYNAMO}": {"free_gpu_memory_fraction": TRTLLM_MEMORY},
}


def stack_of(row: Measured) -> str:
    """Which host runs the row's engine: the engine's own server, or NVIDIA Dynamo's frontend (its
    images served ``nvidia_gap_*``). Constants of the host are by this name."""
    return f"{row.backend} {DYNAMO}" if row.source.startswith("nvidia_gap") else row.backend


def server_of(row: Measured) -> str:
    """The row's server without its load. Rows of one are fitted to, or left out, together."""
    layout = f"tp{row.tp} pp{row.pp} dp{attention_ranks(row)}"
    return f"{stack_of(row)}, {row.model}, {row.system}, {row.precision}, {layout}"


def campaign_of(row: Measured) -> str:
    """The measurements that the row is one of, where their load tool is not recorded, so that its
    clients may have drifted apart; else empty. Their lengths tell campaigns of one source apart."""
    if row.source == "inferencex" or row.length_range_ratio < 1:
        return ""
    return f"{row.source}, {'multiples of 1,000' if row.isl % 1000 == 0 else 'powers of two'}"


def mean_prompt(row: Measured) -> float:
    """Tokens."""
    return row.isl * (1 + row.length_range_ratio) / 2


def scenario_of(row: Measured, host: HostConstants, apart: bool = False) -> dict[str, Any]:
    """The row's scenario as a configuration would have it, with the ``host``'s constants; its
    clients may be ``apart``, with lengths of the same mean. Raises ConfigError for what is not
    modelled, with the reason."""
    for name, value, allowed in (
        ("model", row.model, MODELS),
        ("system", row.system, DEVICES),
        ("backend", row.backend, STACKS),
        ("precision", row.precision, DTYPES),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} {value}: not modelled; modelled: {', '.join(allowed)}")
    if row.mode != "agg":
        raise ConfigError(f"prefill and decode on GPUs of their own: not modelled; mode {row.mode}")
    if row.tp is None:
        raise ConfigError("tp: this key is missing")
    if (dp := attention_ranks(row)) > 1:
        raise ConfigError(f"data-parallel attention: not modelled; dp {dp}")
    mixture = row.model in MIXTURES
    if mixture:
        _refuse_mixture(row)
    ratio = APART if apart else row.length_range_ratio
    isl, osl = (round(most * 2 / (1 + ratio)) if apart else most for most in (row.isl, row.osl))
    return {
        "model": MODELS[row.model],
        "device": DEVICES[row.system],
        "stack": row.backend,
        **_weights(row),
        "kv_cache_dtype": _kv_cache_dtype(row),
        "cluster": {
            "tp": row.tp,
            "pp": row.pp,
            "max_length": isl + osl,
            **({"expert_parallel": _expert_parallel(row)} if mixture else {}),
        },
        "workload": {
            "requests": ROUNDS * row.concurrency,
            "lengths": {
                "kind": "random",
                "prompt": isl,
                "decode": osl,
                "tool": "sglang",
                "range_ratio": ratio,
            },
            "arrivals": {
                "kind": "closed_loop",
                "clients": row.concurrency,
                "think_s": THINK_S,
            },
            "declared": "exact",
        },
        "policy": _policy(row) | (_mixture_policy(row) if mixture else {}),
        "engine": _engine(row, host),
        "kv_cache": {
            "prefix_caching": False,
            **_MEMORY.get(stack_of(row), {}),
            **(_mixture_memory(row) if mixture else {}),
        },
    }


def _engine(row: Measured, host: HostConstants) -> dict[str, float]:
    found = {
        "host_iteration_s": host.host_iteration_s,
        "host_sequence_s": host.host_sequence_s,
        "frontend_s": host.frontend_s + mean_prompt(row) * host.frontend_token_s,
    }
    if row.model in MIXTURES:
        found["launch_layer_s"] = 0.0
    if host.launch_s:
        calls = calls_of_layer(load_model(MODELS[row.model]), _weights(row)["dtype"])
        found["launch_layer_s"] = host.launch_s * calls
    return found


def _weights(row: Measured) -> dict[str, str]:
    """Qwen3's published fp8 checkpoints (``Qwen/Qwen3-32B-FP8``) are quantised in blocks."""
    if row.model in MIXTURES:
        return _mixture_formats(row)
    dtype = DTYPES[row.precision]
    in_blocks = dtype == "fp8" and row.model.startswith("Qwen/Qwen3-")
    return {"dtype": "fp8_block" if in_blocks else dtype}


def _kv_cache_dtype(row: Measured) -> str:
    """bf16 for unquantised models. For others the launch scripts say fp8; vLLM 0.10 on H100 behaves
    as with bf16 (inferred)."""
    if DTYPES[row.precision] == "bf16" or (row.backend == "vllm" and row.system == "h100_sxm"):
        return "bf16"
    return "fp8"


def _policy(row: Measured) -> dict[str, Any]:
    """The engine's settings: of InferenceX its launch scripts'. For ``nvidia_gap_*`` they are not
    recorded; about one new prompt an iteration is inferred for vLLM and TensorRT-LLM, where the
    end of a prompt that decodes push out runs in the next."""
    dynamo = stack_of(row).endswith(DYNAMO)
    if row.backend == "vllm":
        return {
            "name": "vllm",
            "max_num_batched_tokens": row.isl + row.concurrency if dynamo else 8192,
            "max_num_seqs": max(row.concurrency, 16),
            "async_scheduling": True,
        }
    if row.backend == "sglang":
        # The load tools ask for outputs of a fixed length (ignore-eos).
        return {"name": "sglang", "chunked_prefill_size": 8192, "ignore_eos": True}
    waits = not dynamo and row.isl == row.osl == 1024 and (row.tp or 0) < 8
    wait = {"batch_wait_timeout_iters": 20, "batch_wait_max_tokens_ratio": 0.9}
    return {
        "name": "trtllm",
        "max_num_tokens": row.isl if dynamo else max(16384, row.isl),
        "enable_chunked_prefill": dynamo,
        "max_batch_size": max(row.concurrency, 16),
        **(wait if waits else {}),
    }


# How mixtures of experts were served --------------------------------------------------------------


def attention_ranks(row: Measured) -> int:
    """How many ranks have attention of their own. MiniMax's rows have ``tp`` in ``dp`` where its
    experts are spread, but the launch scripts know no data-parallel attention, and 17 loads that
    were measured under both names have the same TPOT within 1 %. In fp4 a second server of that
    name took the loads with more clients: data-parallel (inferred)."""
    if row.model != MINIMAX or row.tp != row.dp or row.moe_ep != row.dp**2:
        return row.dp
    second = row.precision == "fp4" and row.isl == 1024 and row.measured_date >= "2026-04-22"
    return row.dp if second and row.tp == 2 and row.concurrency >= 256 else 1


def measured_cold(row: Measured) -> bool:
    """Whether SGLang compiled kernels of a mixture while the first requests waited: seconds of its
    TTFT, which are not modelled. Its TPOT has no part in them."""
    early = row.source == "inferencex" and row.measured_date < _WARM
    return early and row.backend == "sglang" and row.model in MIXTURES


def _mixture_formats(row: Measured) -> dict[str, str]:
    """``dtype`` and ``moe_dtype``. gpt-oss computes with fp8 activations on Blackwell."""
    known = MIXTURES[row.model][1]
    if row.precision not in known:
        raise ConfigError(
            f"precision {row.precision} of {row.model}: not modelled; modelled: {', '.join(known)}"
        )
    dtype, experts = known[row.precision]
    if experts == "w4a16_mxfp4" and row.system in _BLACKWELL:
        experts = "w4a8_mxfp4_mxfp8"
    return {"dtype": dtype, "moe_dtype": experts}


def _refuse_mixture(row: Measured) -> None:
    """Raises ConfigError for servers whose rows are known to hold what is not modelled, though no
    column says so."""
    if row.source != "inferencex":
        return
    if _speculates(row):
        raise ConfigError("speculative decoding (MTP): not modelled")
    if row.model == GPT_OSS and row.system == "h100_sxm" and row.concurrency == 512:
        raise ConfigError(
            "all requests were sent at once to a server whose max_num_seqs is not recorded"
        )


def _expert_parallel(row: Measured) -> bool:
    """vLLM 0.17's script for MiniMax in fp8 on B200 asked for it whatever the row says."""
    always = (MINIMAX, "b200_sxm", "fp8", "0.17.0")
    found = (row.model, row.system, row.precision, row.backend_version)
    return row.moe_ep > 1 or found == always


def _speculates(row: Measured) -> bool:
    """DeepSeek R1 with multi-token prediction has launch scripts of its own: TensorRT-LLM's image
    1.2.0rc6.post3 and, from 2026 on, 1.1.0rc2.post2 served nothing else. Under SGLang they served
    fp8 on eight B200 (inferred: more than the plain script's 128 requests run at a time)."""
    if row.model != DEEPSEEK[1]:
        return False
    if row.backend == "sglang":
        return (row.system, row.precision, row.tp) == ("b200_sxm", "fp8", 8)
    if row.backend_version == "1.1.0rc2.post2":
        return row.measured_date >= "2026"
    return row.backend_version == "1.2.0rc6.post3"


def _mixture_policy(row: Measured) -> dict[str, Any]:
    """What differs from the settings of dense models. Under Dynamo, TensorRT-LLM takes a prompt and
    1,500 tokens, as AIConfigurator's generator sets it (inferred: with a prompt alone, many decodes
    would leave short prompts no room)."""
    if row.source != "inferencex":
        return {"max_num_tokens": row.isl + 1500} if row.backend == "trtllm" else {}
    of = {"sglang": _sglang, "trtllm": _trtllm, "vllm": _vllm}
    return of[row.backend](row)


def _sglang(row: Measured) -> dict[str, Any]:
    """New requests are looked for every 10 decodes, mostly every 30 with 16 clients or more."""
    fp4, eight = row.precision == "fp4", row.tp == 8
    tokens, running = (16384, 256) if fp4 else (32768, 128) if eight else (8192, 32)
    return {
        "chunked_prefill_size": tokens,
        "max_prefill_tokens": 16384 if fp4 else tokens,
        "max_running_requests": running,
        "scheduler_recv_interval": 30 if row.concurrency >= 16 and (fp4 or eight) else 10,
    }


def _trtllm(row: Measured) -> dict[str, Any]:
    """DeepSeek: one prompt beside the decodes, from 1.2 on at least 8,192 tokens. Only its fp8
    waits to fill batches, with many short requests."""
    no_wait = {"batch_wait_timeout_iters": None, "batch_wait_max_tokens_ratio": 0.0}
    if row.model == GPT_OSS:
        return {"max_num_tokens": 20000, "max_batch_size": 512, **no_wait}
    if row.model not in DEEPSEEK:
        return no_wait
    one = -(-(row.concurrency + row.isl + 64) // 64) * 64
    later = row.backend_version.startswith("1.2")
    found = {"max_num_tokens": max(one, 8192) if later else one, **no_wait}
    if later and row.precision == "fp8" and row.isl == row.osl == 1024 and row.concurrency >= 64:
        found |= {"batch_wait_timeout_iters": 40, "batch_wait_max_tokens_ratio": 0.8}
    return found


def _vllm(row: Measured) -> dict[str, Any]:
    """MiniMax in fp8 keeps vLLM's own limit of sequences on Blackwell."""
    if row.model != MINIMAX or row.precision != "fp8":
        return {}
    return {"max_num_seqs": 1024 if row.system in _BLACKWELL else 256}


def _mixture_memory(row: Measured) -> dict[str, float]:
    """The engine's share of the memory."""
    if row.source != "inferencex":
        return {}
    if row.backend == "sglang" and row.model in DEEPSEEK:
        fp8 = 0.82 if row.tp == 8 else 0.95
        return {"mem_fraction_static": 0.85 if row.precision == "fp4" else fp8}
    if row.backend == "trtllm":
        return {"free_gpu_memory_fraction": 0.85 if row.model == GPT_OSS else 0.8}
    if row.backend == "vllm" and row.model == MINIMAX and row.system in _BLACKWELL:
        return {"gpu_memory_utilization": 0.95}
    return {}
