"""Tables of MLPerf Inference runs of LLMs, the requests of each run, and its scenario.

A table has a row for each valid run of the scenarios Server and Interactive: what the submitter
set, the rate, and what LoadGen logged; times in ms, rates in requests a second. The requests are
LoadGen's: whole permutations of the data set, with exponential gaps between them
(mlcommons/inference at b66003e1, ``loadgen/``). Lengths by sample are in ``lengths_MODEL.csv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, Json

from sarathi_sim.experiments.capacity.options import router_of_ranks
from sarathi_sim.experiments.measured.servers import read_rows
from sarathi_sim.profiler.bundle.csv_cells import read_cells
from sarathi_sim.profiler.facts.formats import Stack, WeightDtype
from sarathi_sim.profiler.facts.ops import OPS, PREFILL
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import UserError, parse, strict_dataclass
from sarathi_sim.simulator.load.trace import Trace
from sarathi_sim.simulator.loop.records import Floats, Ints
from sarathi_sim.simulator.loop.routers import Router

_Name = Annotated[str, Field(min_length=1, max_length=300)]
_Count = Annotated[int, Field(ge=1, le=2**31)]
_Positive = Annotated[float, Field(gt=0, le=1e12)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Seed = Annotated[int, Field(ge=0, lt=2**64)]


@dataclass(frozen=True)
class MlperfTask:
    """A benchmark's model, where its output tokens are in the table of lengths (``{}`` is the
    weights' format; None: all have the run's mean), and the most a request may generate.
    ``drawn``: the column has a few samples, which any input may have."""

    model: str
    output: str | None = "reference_output_tokens"
    most: int = 20_000
    drawn: bool = False


TASKS = {
    "llama2-70b": MlperfTask("llama-2-70b", "served_output_tokens_{}", 1024, drawn=True),
    "llama3.1-405b": MlperfTask("llama-3.1-405b"),
    "llama3.1-8b": MlperfTask("llama-3.1-8b", None),
    "mixtral-8x7b": MlperfTask("mixtral-8x7b", most=1024),
    "deepseek-r1": MlperfTask("deepseek-r1"),
}
#: Those that are mixtures of experts.
MIXTURES = ("mixtral-8x7b", "deepseek-r1")
DEVICES = {
    "B200": "b200-sxm",
    "GB200": "gb200",
    "H100-SXM": "h100-80g-sxm",
    "H200-SXM": "h200-sxm",
    "H200-NVL": "h200-sxm",
    "RTX-PRO-6000": "rtx-pro-6000",
}
#: GPUs without tables of their own: what multiplies the other's times where matrix units are the
#: limit, the ratio of their dense fp8 FLOP/s (data sheets: 1,979 and 1,671 TFLOP/s).
SLOWER = {"H200-NVL": 1979 / 1671}
#: The version that NVIDIA names is a commit of July 2025, of this release.
TRTLLM = "1.0"
#: A setting of the PyTorch backend; the other runs are TensorRT engines.
PYTORCH = "cuda_graph_padding_enabled"
ENGINES: dict[str, Stack] = {"TensorRT-LLM": "trtllm", "vLLM": "vllm"}
MEMORY: dict[Stack, str] = {"trtllm": "free_gpu_memory_fraction", "vllm": "gpu_memory_utilization"}
#: NVIDIA's harness (``closed/NVIDIA/code/llmlib``) looks at replicas' requests in Server only.
ROUTERS: dict[str, Router] = {"Server": "least_requests", "Interactive": "round_robin"}
FORMATS: dict[str, WeightDtype] = {"fp8": "fp8", "fp4": "nvfp4"}


class MlperfRun(BaseModel):
    """One run. ``rate`` is that of the arrivals as drawn, ``target_rate_per_s`` that asked for.

    A run whose submitter published no settings has no ``tp``, ``pp``, ``max_batch_size`` and
    ``max_num_tokens``. These, and the share of the memory, are one replica's.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    id: _Name
    gpu: _Name
    n_gpus: _Count
    model: _Name
    scenario: Literal["Server", "Interactive"]
    rate: _Positive = Field(alias="scheduled_samples_per_s")
    target_rate_per_s: _Positive
    offline_samples_per_s: _Positive
    n_queries: _Count
    schedule_rng_seed: _Seed
    schedule_duration_s: _Positive
    output_tokens_mean: _Positive
    ttft_ms_mean: _Positive
    ttft_ms_p99: _Positive
    tpot_ms_mean: _Positive
    tpot_ms_p99: _Positive
    ttft_limit_ms: _Positive
    tpot_limit_ms: _Positive
    measurement_weight_type: Literal["fp8", "fp4"]
    engine: _Name
    engine_version: str = ""
    tp: _Count | None = None
    pp: _Count | None = None
    ep: _Count | None = None
    attention_dp: bool = False
    kv_precision: Literal["fp8", "auto"] = "fp8"  # B200's Interactive runs do not say
    max_batch_size: _Count | None = None
    max_num_tokens: _Count | None = None
    max_seq_tokens: _Count | None = None
    chunked_prefill: bool = False
    batch_scheduler_policy: Literal["max_util"] = "max_util"
    kv_free_gpu_mem_fraction: _Share = 0.9
    tokens_per_block: _Count | None = None
    other_flags: Json[dict[str, Any]] = Field(default_factory=dict)

    @property
    def cell(self) -> str:
        """What a fit leaves out: GPU, number of GPUs, model."""
        return f"{self.gpu} x {self.n_gpus}, {self.model}"

    @property
    def in_engine(self) -> bool:
        """Whether TensorRT's engines ran it: TensorRT-LLM without its PyTorch backend."""
        return self.engine == "TensorRT-LLM" and PYTORCH not in self.other_flags

    @property
    def stresses(self) -> dict[str, float]:
        """P99 over its limit, by metric."""
        return {
            "ttft": self.ttft_ms_p99 / self.ttft_limit_ms,
            "tpot": self.tpot_ms_p99 / self.tpot_limit_ms,
        }

    @property
    def stress(self) -> float:
        """The larger of them: a run near 1 stopped there."""
        return max(self.stresses.values())

    @property
    def binds(self) -> str:
        """Whose limit is nearer."""
        return max(self.stresses, key=lambda metric: self.stresses[metric])

    @property
    def replicas(self) -> int:
        """Replicas that hold the whole model. Raises UserError without the layout, and for GPUs
        that are no multiple of a replica's."""
        if self.tp is None or self.pp is None:
            raise UserError("the submitter published no settings")
        replicas, over = divmod(self.n_gpus, self.tp * self.pp)
        if over or not replicas:
            raise UserError(f"n_gpus {self.n_gpus}: no multiple of tp x pp, {self.tp * self.pp}")
        return replicas


@strict_dataclass
class MlperfHost:
    """What was fitted to the runs ``fitted_to``, by cell.

    ``host_iteration_s``: the seconds that an iteration of TensorRT's engines waits for its host,
    with which their mean time per output token is right. ``all_reduce``: the factor on the time of
    messages with which their mean time to first token is right. ``errors`` of capacities are
    logarithms, root mean square; each cell had the medians of the others.
    """

    fitted_to: str
    host_iteration_s: dict[str, float]
    all_reduce: dict[str, float]
    errors: dict[str, float]

    def without(self, cell: str = "") -> tuple[float, float]:
        """Host time and factor on messages: the medians of the other cells, of all for a cell that
        is not among them. Without any it is 0 and 1."""
        return _others(self.host_iteration_s, cell, 0.0), _others(self.all_reduce, cell, 1.0)

    def error_without(self, cell: str) -> float:
        """The root mean square of the other cells' errors; of mixtures of experts if it is one and
        there is one, of dense models if it is none."""
        mixture = _is_mixture(cell)
        alike = [
            e for name, e in self.errors.items() if name != cell and _is_mixture(name) == mixture
        ]
        found = alike or [e for name, e in self.errors.items() if name != cell]
        return float(np.sqrt(np.mean(np.square(found)))) if found else 0.0


def _others(by_cell: Mapping[str, float], cell: str, without: float) -> float:
    found = [value for name, value in by_cell.items() if name != cell]
    return float(np.median(found)) if found else without


def _is_mixture(cell: str) -> bool:
    return cell.rpartition(", ")[2] in MIXTURES


@lru_cache(maxsize=1)
def mlperf_host() -> MlperfHost:
    """The shipped constants."""
    path = data_dir() / "mlperf_host.yaml"
    return parse(MlperfHost, read_mapping(path), path)


def read_mlperf(path: Path) -> tuple[list[MlperfRun], dict[str, str]]:
    """The runs of a table, and the reasons of refused rows by id. Raises UserError for a file
    that is no such table."""
    return read_rows(path, MlperfRun)


def gaps_ns(seed: int, rate: float, count: int) -> Ints:
    """The gaps that LoadGen draws between ``count`` requests, in whole nanoseconds.

    A Mersenne Twister is seeded with the lower half of ``seed``. Two of its words are a fraction of
    64 bits, the first the low one, whose logarithm is an exponential gap of mean 1 / ``rate`` s.
    """
    twister = np.random.RandomState(seed % 2**32)
    words = twister.randint(0, 2**32, (count, 2), dtype=np.uint32).astype(np.float64)
    fraction = np.ldexp(words[:, 0] + np.ldexp(words[:, 1], 32), -64)
    return np.asarray(-np.log(1.0 - fraction) / rate * 1e9, np.int64)


def schedule_s(run: MlperfRun) -> Floats:
    """Seconds at which the run's requests arrive: the first at 0, each before its own gap."""
    until = np.cumsum(gaps_ns(run.schedule_rng_seed, run.target_rate_per_s, run.n_queries))
    return np.concatenate([[0], until[:-1]]) / 1e9


def requests_of(run: MlperfRun, folder: Path, seed: int = 0) -> Trace:
    """The run's requests: arrivals as they were, and lengths from the tables in ``folder``.

    Each round of requests has every sample once, in a random order (LoadGen's is not known).
    Outputs are scaled, and cut to the benchmark's limit, so that their mean is the run's. Raises
    UserError for an unknown benchmark, and for a table that lacks the lengths.
    """
    task = _task(run)
    path = folder / f"lengths_{run.model}.csv"
    rng = np.random.default_rng(seed)
    prompt = _column(path, "input_tokens")
    rounds = -(-run.n_queries // len(prompt))
    order = np.concatenate([rng.permutation(len(prompt)) for _ in range(rounds)])[: run.n_queries]
    output: Floats = np.ones(len(order))
    if task.output is not None:
        output = _column(path, task.output.format(run.measurement_weight_type))
        known = output[output > 0]
        if not task.drawn and len(known) < len(output):
            raise UserError(f"{path}: {task.output}: samples without a length")
        output = rng.choice(known, len(order)) if task.drawn else output[order]
    tokens = scaled(output, run.output_tokens_mean, task.most)
    prompts = prompt[order].astype(np.int64)
    if run.max_seq_tokens is not None:  # what the engine was built for
        tokens = np.clip(tokens, 1, np.maximum(run.max_seq_tokens - prompts, 1))
    return Trace(prompts, tokens, schedule_s(run))


def scaled(tokens: Floats, mean: float, most: int) -> Ints:
    """Whole tokens from 1 to ``most`` in proportion to ``tokens``, with nearly this mean."""
    factor, found = 1.0, np.asarray(tokens, np.int64)
    for _ in range(30):  # what is cut no longer grows
        factor *= mean / found.mean()
        found = np.clip(np.rint(factor * tokens), 1, most).astype(np.int64)
    return found


def _column(path: Path, name: str) -> Floats:
    cells = read_cells(path)
    if name not in cells.columns:
        raise UserError(f"{path}: column {name} is missing")
    found: Floats = np.nan_to_num(cells[name].to_numpy(np.float64))
    if not (found > 0).any():
        raise UserError(f"{path}: {name}: no sample has a length")
    return found


def _task(run: MlperfRun) -> MlperfTask:
    if run.model not in TASKS:
        raise UserError(f"model {run.model}: not modelled; modelled: {', '.join(TASKS)}")
    return TASKS[run.model]


def scenario_of(run: MlperfRun, trace: Path) -> dict[str, Any]:
    """The run as a configuration would have it, with its requests in the file ``trace``.

    Client and engine share a process, so there is no front end. Raises UserError, with the
    reason, for a run without settings, and for a GPU, engine or layout that is not modelled.
    """
    task, replicas = _task(run), run.replicas
    for key, value, known in (("gpu", run.gpu, DEVICES), ("engine", run.engine, ENGINES)):
        if value not in known:
            raise UserError(f"{key} {value}: has no tables; there: {', '.join(known)}")
    stack, weights = ENGINES[run.engine], FORMATS[run.measurement_weight_type]
    version = TRTLLM if stack == "trtllm" else run.engine_version or None
    return {
        "model": task.model,
        "device": DEVICES[run.gpu],
        "stack": stack if version is None else f"{stack}@{version}",
        "dtype": weights,
        "kv_cache_dtype": "bf16" if run.kv_precision == "auto" else "fp8",
        "cluster": _given(
            pp=run.pp,
            replicas=replicas,
            router=ROUTERS[run.scenario],
            max_length=run.max_seq_tokens,
            **_layout(run),
        ),
        "workload": {
            "lengths": {"kind": "trace", "path": str(trace)},
            "arrivals": {"kind": "trace"},
        },
        "policy": {"name": stack, **_settings(run, stack)},
        "kv_cache": _given(
            **{MEMORY[stack]: run.kv_free_gpu_mem_fraction},
            block_size=run.tokens_per_block or run.other_flags.get("block-size"),
            prefix_caching=False,
        ),
        "engine": _engine_of(run),
    }


def _layout(run: MlperfRun) -> dict[str, Any]:
    """With data-parallel attention each GPU of a replica is a rank. Its experts are gathered
    (TensorRT-LLM ``fused_moe_cutlass.py``, ``select_alltoall_method_type``: there are no more ranks
    than a token has experts)."""
    if not run.attention_dp:
        return {"tp": run.tp}
    spread = (run.ep or 1) > 1
    router = router_of_ranks(ENGINES[run.engine])
    return {"tp": 1, "dp": run.tp, "rank_router": router, "expert_parallel": spread}


def _balance(run: MlperfRun) -> dict[str, Any]:
    """How ranks wait for each other's prompts; what a run does not say is the harness's default
    (``code/llmlib/config.py``)."""
    if not run.attention_dp:
        return {}
    flags = run.other_flags
    return {
        "enable_balance": flags.get("adp_balancing_enable", True),
        "batching_wait_iters": flags.get("adp_balancing_batching_wait_iters", 10),
        "timeout_iters": flags.get("adp_balancing_timeout_iters", 500),
    }


def _engine_of(run: MlperfRun) -> dict[str, Any]:
    found: dict[str, Any] = {"frontend_s": 0.0}
    if run.in_engine:
        found["executor"] = "tensorrt"
    if run.gpu in SLOWER:
        computing = [op for op, of in OPS.items() if of.shape is not None or op == PREFILL]
        found["op_scale"] = dict.fromkeys(computing, SLOWER[run.gpu])
    return found


def _settings(run: MlperfRun, stack: Stack) -> Mapping[str, Any]:
    """The settings of the policy, by its engine's names."""
    if stack == "vllm":
        return _given(
            version=run.engine_version or None,
            max_num_batched_tokens=run.max_num_tokens,
            max_num_seqs=run.max_batch_size,
            long_prefill_token_threshold=run.other_flags.get("long-prefill-token-threshold"),
        )
    return _given(
        max_num_tokens=run.max_num_tokens,
        max_batch_size=run.max_batch_size,
        capacity_scheduler_policy="max_utilization",  # ``max_util``, as all runs have it
        enable_chunked_prefill=run.chunked_prefill,
        disable_overlap_scheduler=run.in_engine,
        **_balance(run),
    )


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
