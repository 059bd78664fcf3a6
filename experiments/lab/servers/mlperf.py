"""MLPerf Inference runs of LLMs: their requests, their scenarios, and their predictions.

A table has a row for each valid run: what the submitter set, the rate, and what LoadGen logged;
times in ms, rates in requests a second. The requests are LoadGen's (mlcommons/inference at
b66003e1, ``loadgen/``). docs/lab/mlperf.md says what is compared, and how the constants of
TensorRT's engines are fitted: a cell (GPU, number of GPUs, model) has the medians of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, Json

from sarathi_sim.profiler.bundle.tables import read_cells
from sarathi_sim.profiler.facts.formats import Stack
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, OPS, PREFILL
from sarathi_sim.profiler.kernels.borrowed import LENT_PCT
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, load_shipped
from sarathi_sim.profiler.storage.strict import UserError, strict_dataclass
from sarathi_sim.simulator.confidence.bands import UNKNOWN, covering_width
from sarathi_sim.simulator.confidence.op_errors import NORMAL_90
from sarathi_sim.simulator.load.engine_memory import STACK_SHARES
from sarathi_sim.simulator.load.trace import Trace
from sarathi_sim.simulator.loop.records import Floats, Ints
from sarathi_sim.simulator.loop.routers import Router
from ...capacity import options as capacity
from ...capacity import search
from ...capacity.options import Option
from ...capacity.probing import Laboratory
from ...capacity.search import Probe, Search
from ...capacity.slo import CapacitySection
from ...config.base import Source
from ...config.deployment import Deployment, deploy
from ...config.loading import check_scenario
from ...run.uncertainty import CapacityDiscrepancy
from ...sweeps.backends import Backend
from ...sweeps.plan import SharedRequests
from ..fit.devices import today
from .rows import METRICS, Name, Positive, present, read_tables
from .runs import Bench, bench
from .scenarios import DTYPES, Settings

T = TypeVar("T")
LATENCIES = {f"{m}_ms_{s}": (f"{m}_s", s) for m in METRICS for s in ("mean", "p99")}
"""The scored latencies, with their places in a run's summary."""
CAPACITY = "capacity_per_s"
CAPACITIES = "mlperf_capacities.csv"
MIXTURES = ("mixtral-8x7b", "deepseek-r1")
"""MLPerf's models that are mixtures of experts."""
A_REPLICA, OF_PILOT = 20_000, 2_000
"""Requests of a run, and of a pilot, for each replica; at most the run's own."""
TOLERANCE = 0.01
TRIED_S = (0.004, 0.008)
"""Host times of an iteration at which a fit simulates; between and beside them it is linear."""
TRIED_FACTORS = (0.5, 1.0)
"""The same of the factor on messages."""
SETTLED = 0.92
"""A run's share of Offline up to which its time per output token says something of the host: near
saturation it says how far saturation is."""
BOUND = 0.9
"""A run whose P99 is at this share of a limit stopped there."""
WITHIN = (0.95, 1.10)
"""A capacity that is right for a run that stopped at a limit, over its rate."""
BRACKET = (0.97, 1.05)
"""For other runs: the least capacity over the rate, and the largest over Offline."""
_Count = Annotated[int, Field(ge=1, le=2**31)]


@dataclass(frozen=True)
class MlperfTask:
    """A benchmark's model, the column of its outputs' lengths (``{}`` is the weights' format; None:
    all have the run's mean; ``drawn``: any input may have any), and the most of a request."""

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
#: NVIDIA's harness (``closed/NVIDIA/code/llmlib``) looks at replicas' requests in Server only.
ROUTERS: dict[str, Router] = {"Server": "least_requests", "Interactive": "round_robin"}


class MlperfRun(BaseModel):
    """One run. ``rate`` is that of the arrivals as drawn, ``target_rate_per_s`` that asked for.
    Settings are one replica's; some submitters published none."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    id: Name
    gpu: Name
    n_gpus: _Count
    model: Name
    scenario: Literal["Server", "Interactive"]
    rate: Positive = Field(alias="scheduled_samples_per_s")
    target_rate_per_s: Positive
    offline_samples_per_s: Positive
    n_queries: _Count
    schedule_rng_seed: Annotated[int, Field(ge=0, lt=2**64)]
    schedule_duration_s: Positive
    output_tokens_mean: Positive
    ttft_ms_mean: Positive
    ttft_ms_p99: Positive
    tpot_ms_mean: Positive
    tpot_ms_p99: Positive
    ttft_limit_ms: Positive
    tpot_limit_ms: Positive
    measurement_weight_type: Literal["fp8", "fp4"]
    engine: Name
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
    kv_free_gpu_mem_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
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
        """P99 over its limit, by metric; where the larger is near 1 the run stopped there."""
        return {m: getattr(self, f"{m}_ms_p99") / getattr(self, f"{m}_limit_ms") for m in METRICS}

    @property
    def stopped(self) -> bool:
        """Whether a limit stopped it."""
        return max(self.stresses.values()) >= BOUND

    @property
    def most(self) -> float:
        """The most that it may carry: its rate if it stopped at a limit, else Offline."""
        return self.rate if self.stopped else self.offline_samples_per_s

    def allows(self, capacity: float) -> bool:
        """Whether a capacity is near enough to the range from the rate to :attr:`most`."""
        low, high = WITHIN if self.stopped else BRACKET
        return low * self.rate <= capacity <= high * self.most

    @property
    def binds(self) -> str:
        """Whose limit is nearer."""
        return max(self.stresses, key=self.stresses.__getitem__)

    @property
    def simulated(self) -> int:
        """The number of requests that are simulated."""
        return min(self.n_queries, A_REPLICA * self.replicas)

    @property
    def replicas(self) -> int:
        """Replicas that hold the whole model. Raises UserError if GPUs are no multiple of them."""
        if self.tp is None or self.pp is None:
            raise UserError("the submitter published no settings")
        replicas, over = divmod(self.n_gpus, self.tp * self.pp)
        if over or not replicas:
            raise UserError(f"n_gpus {self.n_gpus}: no multiple of tp x pp, {self.tp * self.pp}")
        return replicas


def is_mixture(cell: str) -> bool:
    """Whether a cell's model is a mixture of experts."""
    return cell.rpartition(", ")[2] in MIXTURES


@strict_dataclass
class MlperfHost:
    """By cell: seconds that an iteration of TensorRT's engines waits for its host, with which mean
    TPOT is right, the factor on the time of messages with which mean TTFT is, and the root mean
    square of the logarithms of capacities' ``errors``."""

    fitted_to: str
    host_iteration_s: dict[str, float]
    all_reduce: dict[str, float]
    errors: dict[str, float]

    def without(self, cell: str = "") -> tuple[float, float]:
        """Host time and factor on messages: the medians of the other cells; without any 0 and 1."""
        found = ((self.host_iteration_s, 0.0), (self.all_reduce, 1.0))
        host_s, factor = (
            np.median([of[name] for name in of if name != cell] or [none]) for of, none in found
        )
        return float(host_s), float(factor)

    def error_without(self, cell: str) -> float:
        """The root mean square of the other cells' errors; of those alike, dense models or mixtures
        of experts, if there are any."""
        others = {name: error for name, error in self.errors.items() if name != cell}
        alike = [e for name, e in others.items() if is_mixture(name) == is_mixture(cell)]
        return _root_mean_square(alike or [*others.values()] or [0.0])


@lru_cache(maxsize=1)
def mlperf_host() -> MlperfHost:
    """The shipped constants."""
    return load_shipped(MlperfHost, "mlperf_host.yaml")


def gaps_ns(seed: int, rate: float, count: int) -> Ints:
    """The gaps that LoadGen draws between ``count`` requests, in whole nanoseconds: a Mersenne
    Twister is seeded with the lower half of ``seed``; two of its words are a fraction of 64 bits,
    the first the low one, whose logarithm is an exponential gap of mean 1 / ``rate`` s."""
    twister = np.random.RandomState(seed % 2**32)
    words = twister.randint(
        0,
        2**32,
        (count, 2),
        dtype=np.uint32,
    ).astype(np.float64)
    fraction = np.ldexp(words[:, 0] + np.ldexp(words[:, 1], 32), -64)
    return np.asarray(-np.log(1.0 - fraction) / rate * 1e9, np.int64)


def schedule_s(run: MlperfRun) -> Floats:
    """Seconds at which the run's requests arrive: the first at 0, each before its own gap."""
    until = np.cumsum(gaps_ns(run.schedule_rng_seed, run.target_rate_per_s, run.n_queries))
    return np.concatenate([[0], until[:-1]]) / 1e9


def requests_of(run: MlperfRun, folder: Path, seed: int = 0) -> Trace:
    """The run's requests: arrivals as they were, and lengths from the tables in ``folder``. Each
    round has every sample once, in a random order (LoadGen's is not known). Outputs are scaled, and
    cut to the benchmark's limit, so that their mean is the run's. Raises UserError where there are
    no lengths."""
    task = _task(run)
    path = folder / f"lengths_{run.model}.csv"
    rng = np.random.default_rng(seed)
    prompt = _column(path, "input_tokens")
    rounds = range(-(-run.n_queries // len(prompt)))
    order = np.concatenate([rng.permutation(len(prompt)) for _ in rounds])[: run.n_queries]
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


def scenario_of(run: MlperfRun, trace: Path) -> Settings:
    """The run as a configuration has it, with its requests in the file ``trace``; client and engine
    share a process, so there is no front end. Raises UserError for what is not modelled."""
    task, replicas = _task(run), run.replicas
    for key, value, known in (("gpu", run.gpu, DEVICES), ("engine", run.engine, ENGINES)):
        if value not in known:
            raise UserError(f"{key} {value}: has no tables; known: {', '.join(known)}")
    stack, flags = ENGINES[run.engine], run.other_flags
    version = TRTLLM if stack == "trtllm" else run.engine_version or None
    layout: Settings = {"tp": run.tp}
    if stack == "vllm":
        settings = {
            "version": version,
            "max_num_batched_tokens": run.max_num_tokens,
            "max_num_seqs": run.max_batch_size,
            "long_prefill_token_threshold": flags.get("long-prefill-token-threshold"),
        }
    else:
        settings = {
            "max_num_tokens": run.max_num_tokens,
            "max_batch_size": run.max_batch_size,
            "capacity_scheduler_policy": "max_utilization",  # ``max_util``, as all runs have it
            "enable_chunked_prefill": run.chunked_prefill,
            "disable_overlap_scheduler": run.in_engine,
        }
    if run.attention_dp:
        # Each GPU of a replica is a rank. Its experts are gathered (TensorRT-LLM
        # ``fused_moe_cutlass.py``, ``select_alltoall_method_type``: there are no more ranks than a
        # token has experts). What a run does not say is the harness's default
        # (``code/llmlib/config.py``).
        router, spread = capacity.router_of_ranks(stack), (run.ep or 1) > 1
        layout = {"tp": 1, "dp": run.tp, "rank_router": router, "expert_parallel": spread}
        settings |= {
            "enable_balance": flags.get("adp_balancing_enable", True),
            "batching_wait_iters": flags.get("adp_balancing_batching_wait_iters", 10),
            "timeout_iters": flags.get("adp_balancing_timeout_iters", 500),
        }
    placed = {"router": ROUTERS[run.scenario], "max_length": run.max_seq_tokens}
    computing = [op for op, of in OPS.items() if of.shape is not None or op == PREFILL]
    slower = dict.fromkeys(computing, SLOWER[run.gpu]) if run.gpu in SLOWER else None
    return {
        "model": task.model,
        "device": DEVICES[run.gpu],
        "stack": stack if version is None else f"{stack}@{version}",
        "dtype": DTYPES[run.measurement_weight_type],
        "kv_cache_dtype": "bf16" if run.kv_precision == "auto" else "fp8",
        "cluster": present(pp=run.pp, replicas=replicas, **placed, **layout),
        "workload": {
            "lengths": {"kind": "trace", "path": str(trace)},
            "arrivals": {"kind": "trace"},
        },
        "policy": {"name": stack, **present(**settings)},
        "kv_cache": present(
            **{STACK_SHARES[stack]: run.kv_free_gpu_mem_fraction},
            block_size=run.tokens_per_block or flags.get("block-size"),
            prefix_caching=False,
        ),
        "engine": present(
            frontend_s=0.0, executor="tensorrt" if run.in_engine else None, op_scale=slower
        ),
    }


Band = tuple[float, float, float]
"""A predicted number, and the ends of its 90 % band."""


def _band(*ends: float) -> Band:
    """The first number, in a band that holds all of them."""
    return ends[0], min(ends), max(ends)


@dataclass(frozen=True)
class PredictedRun:
    """The predictions for a run by column, and the limit that the capacity meets first."""

    numbers: Mapping[str, Band]
    binds: str

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.numbers[CAPACITY][0]


@dataclass(frozen=True)
class ScoredMlperf:
    """Runs, with predictions or reasons for none by id; ``host`` may be ``fitted`` here."""

    runs: Sequence[MlperfRun]
    best: Mapping[str, PredictedRun]
    refused: Mapping[str, str]
    host: MlperfHost
    fitted: bool = False

    @property
    def capacities(self) -> pd.DataFrame:
        """The runs that stopped at a limit."""
        stopped = [run for run in self.runs if run.stopped and run.id in self.best]
        rows = [(run.id, run.cell, run.rate, self.best[run.id].capacity) for run in stopped]
        return pd.DataFrame(rows, columns=["id", "cell", "measured_per_s", "predicted_per_s"])

    def content(self) -> dict[str, Any]:
        """As ``score --json`` prints it. Llama-3.1-8B is a judge of the host, and apart."""
        best = self.best
        answered = [run for run in self.runs if run.id in best]
        large = [run for run in answered if run.model != "llama3.1-8b"]
        groups = {
            "all but 8B": large,
            "Interactive": [run for run in large if run.scenario == "Interactive"],
            "Llama-3.1-8B": [run for run in answered if run not in large],
        }
        inside = [
            low <= getattr(run, key) <= high
            for run in answered
            for key, (_, low, high) in best[run.id].numbers.items()
            if key in LATENCIES
        ]

        def judged(stopped: bool) -> dict[str, int]:
            runs = [run for run in answered if run.stopped == stopped]
            right = sum(run.allows(best[run.id].capacity) for run in runs)
            return {"rows": len(runs), "within": right}

        def errors(runs: Sequence[MlperfRun], key: str) -> dict[str, float]:
            off = [100 * (best[run.id].numbers[key][0] / getattr(run, key) - 1) for run in runs]
            sizes = {"mape": float(np.mean(np.abs(off))), "bias": float(np.mean(off))}
            return {"rows": len(off), **sizes}

        same = sum(run.stopped and best[run.id].binds == run.binds for run in answered)
        return {
            "mlperf": {
                "rows": len({run.id for run in self.runs} | self.refused.keys()),
                "answered": len(best),
                "stopped_at_a_limit": judged(True)
                | {"same_limit": same, "in_90": sum(within_error(self.capacities))},
                "proven": judged(False),
                "latencies": {
                    n: {key: errors(of, key) for key in LATENCIES} for n, of in groups.items() if of
                },
                "in_band_pct": 100 * float(np.mean(inside)) if inside else None,
            },
            "runs": {
                run.id: {
                    "scenario": run.scenario,
                    "rate": run.rate,
                    "offline": run.offline_samples_per_s,
                    "stress": run.stresses[run.binds],
                    "limit": run.binds,
                    "binds": best[run.id].binds,
                    "right": run.allows(best[run.id].capacity),
                    "measured": {key: getattr(run, key) for key in LATENCIES},
                    "predicted": {key: [*each] for key, each in best[run.id].numbers.items()},
                }
                for run in answered
            },
            "refused": dict(self.refused),
        }

    def write(self, folder: Path) -> None:
        """``predictions.csv``, and the constants if they were fitted."""
        ends, lines = ("", "_low", "_high"), []
        for id in dict.fromkeys([*(run.id for run in self.runs), *self.refused]):
            cells: dict[str, Any] = {"id": id, "reason": " ".join(self.refused.get(id, "").split())}
            for key, of in self.best[id].numbers.items() if id in self.best else ():
                cells |= dict(zip((f"{key}{end}" for end in ends), of, strict=True))
            lines.append(cells)
        columns = [f"{name}{end}" for name in (CAPACITY, *LATENCIES) for end in ends]
        table = pd.DataFrame(lines, columns=["id", *columns, "reason"])
        table.to_csv(folder / "predictions.csv", index=False, float_format="%.6g")
        if self.fitted:
            rows = self.capacities
            rows.to_csv(folder / CAPACITIES, index=False, float_format="%.6g")
            error = fitted_error(rows)
            for name, content in (("mlperf_host", self.host), ("capacity_error", error)):
                write_whole(folder / f"{name}.yaml", dump_yaml(asdict(content)).encode())


def score_mlperf(
    files: Sequence[Path],
    lengths: Path,
    backend: Backend,
    progress: Progress,
    say: Say,
    *,
    fit: bool = False,
) -> ScoredMlperf:
    """Predict the runs of tables; with ``fit`` each cell with constants of these tables' others."""
    runs, refused = read_tables(files, MlperfRun)
    with bench(backend, progress, say) as at:
        options = options_of(runs, lengths, at, refused)
        answered = [run for run in runs if run.id in options]
        host = fit_engines(answered, options, at) if fit else mlperf_host()
        for run in answered:
            if run.in_engine:
                options[run.id] = with_host(options[run.id], *host.without(run.cell))
        found = search_all({one: _predicted(one) for one in options.values()}, at)
        of_run = {id: found[option] for id, option in options.items()}
        refused |= {id: one for id, one in of_run.items() if isinstance(one, str)}
        best = {id: one for id, one in of_run.items() if not isinstance(one, str)}
        if fit:
            host = replace(host, errors=errors_of_cells(best, runs))
        best = with_bands(best, runs, host, options, at)
    return ScoredMlperf(runs, best, refused, host, fit)


def errors_of_cells(
    best: Mapping[str, PredictedRun], runs: Iterable[MlperfRun]
) -> dict[str, float]:
    """By cell, the root mean square of the logarithm of predicted over measured capacity: the
    nearest from the rate to :attr:`MlperfRun.most`."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.id in best:
            capacity = best[run.id].capacity
            known = min(max(capacity, run.rate), max(run.most, run.rate))
            found.setdefault(run.cell, []).append(float(np.log(capacity / known)))
    return {cell: _root_mean_square(off) for cell, off in found.items()}


def _root_mean_square(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@dataclass(frozen=True, eq=False)
class LoadGenOption(Option):
    """The system of a run, and how its capacity is searched."""

    plan: search.SearchPlan
    slo: str

    def at(self, probe: Probe, load: str) -> Deployment:
        """All replicas, with the first requests of the run, sent faster or slower."""
        arrivals = capacity.arrivals_at(self.scenario, probe.load, load, self.natural_rate)
        scenario = self.scenario.having("workload", requests=probe.requests, arrivals=arrivals)
        if probe.slower != 1:
            scenario = capacity.slowed(scenario, OPS, probe.slower)
        return replace(self.deployment, scenario=scenario)

    @cached_property
    def alike(self) -> int:
        """No replica stands for another."""
        return 1


@cache
def with_host(option: LoadGenOption, host_s: float, all_reduce: float) -> LoadGenOption:
    """The same with another host time of an iteration, and factor on all-reduces."""
    scale = option.scenario.engine.op_scale | {ALL_REDUCE: all_reduce}
    scenario = option.scenario.having("engine", host_iteration_s=host_s, op_scale=scale)
    return replace(option, deployment=replace(option.deployment, scenario=scenario))


def option_of(run: MlperfRun, deployment: Deployment) -> LoadGenOption:
    """A run's system; its capacity is searched with one schedule, LoadGen's."""
    slo = f"p99 ttft {run.ttft_limit_ms:g}ms, p99 tpot {run.tpot_limit_ms:g}ms"
    plan = search.SearchPlan(
        TOLERANCE,
        least=2,
        most=2,
        requests=run.simulated,
        pilot_requests=min(run.simulated, OF_PILOT * run.replicas),
        seed=0,
        pooled=partial(capacity.pooled, CapacitySection(slo=slo, tolerance=TOLERANCE)),
        limit_s=run.ttft_limit_ms / 1e3,
        budget=run.simulated,
    )
    return LoadGenOption(run.id, {}, deployment, plan, slo)


def options_of(
    runs: Sequence[MlperfRun], lengths: Path, at: Bench, refused: dict[str, str]
) -> dict[str, LoadGenOption]:
    """The systems by id, shared by runs with equal scenarios; ``refused`` gets the reasons."""
    found, alike = dict[str, LoadGenOption](), dict[str, LoadGenOption]()
    requests = SharedRequests()
    for number, run in enumerate(runs):
        at.progress("checking", number, len(runs))
        source = Source("mlperf", run.id, {}, ())
        try:
            tree = scenario_of(run, _trace(run, runs, lengths, at.store.folder.parent / "mlperf"))
            if (key := repr(tree)) not in alike:
                deployment = deploy(check_scenario(tree, source), source, requests)
                alike[key] = option_of(run, deployment)
            found[run.id] = alike[key]
        except UserError as error:
            refused[run.id] = str(error).removeprefix("mlperf: ")
    return found


def _trace(run: MlperfRun, runs: Sequence[MlperfRun], lengths: Path, folder: Path) -> Path:
    """The requests of a run, in a file that is named by what they depend on. Their mean output is
    that of all ``runs`` of the benchmark in the number format: it differs by 1 %."""
    what = (run.model, run.measurement_weight_type)
    alike = (run for run in runs if (run.model, run.measurement_weight_type) == what)
    mean = round(float(np.mean([one.output_tokens_mean for one in alike])), 2)
    key = (*what, run.simulated, run.target_rate_per_s, mean, run.schedule_rng_seed, str(lengths))
    path = folder / f"{run.model}_{sha256(repr(key).encode()).hexdigest()[:12]}.csv"
    if not path.is_file():
        first = {"n_queries": run.simulated, "output_tokens_mean": mean}
        found = requests_of(run.model_copy(update=first), lengths)
        lengths_of = {"prompt_tokens": found.prompt, "output_tokens": found.output}
        table = pd.DataFrame({"arrival_s": found.arrival_s, **lengths_of})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, table.to_csv(index=False).encode())
    return path


def fit_engines(
    runs: Iterable[MlperfRun], options: Mapping[str, LoadGenOption], at: Bench
) -> MlperfHost:
    """The factor on messages with which mean TTFT is right, then the host's time with which mean
    TPOT is, by cell. Runs near saturation tell neither."""
    settled = [
        run for run in runs if run.in_engine and run.rate <= SETTLED * run.offline_samples_per_s
    ]

    def solved(
        key: str,
        runs: Sequence[MlperfRun],
        tried: tuple[float, float],
        constants: Callable[[MlperfRun, float], tuple[float, float]],
    ) -> dict[str, float]:
        """The constant with which a latency is right, on the line through two; medians of cells."""
        systems = [
            [with_host(options[run.id], *constants(run, value)) for value in tried] for run in runs
        ]
        found = search_all({one: _at_rate(one) for one in chain(*systems)}, at)
        of_cell: dict[str, list[float]] = {}
        for run, pair in zip(runs, systems, strict=True):
            low, high = map(found.__getitem__, pair)
            if not isinstance(low, str) and not isinstance(high, str):
                part = (getattr(run, key) - low[0][key]) / (high[0][key] - low[0][key])
                value = tried[0] + part * (tried[1] - tried[0])
                of_cell.setdefault(run.cell, []).append(max(value, 0.1 * tried[0]))
        return {cell: float(np.median(each)) for cell, each in of_cell.items()}

    middle_s = np.mean(TRIED_S).item()
    several = [run for run in settled if (run.tp or 1) > 1]
    messages = solved("ttft_ms_mean", several, TRIED_FACTORS, lambda _, factor: (middle_s, factor))
    gpus = ", ".join(sorted({run.gpu for run in settled}))
    host = MlperfHost(f"{len(settled)} runs on {gpus}", {}, messages, {})
    times = solved(
        "tpot_ms_mean", settled, TRIED_S, lambda run, host_s: (host_s, host.without(run.cell)[1])
    )
    return replace(host, host_iteration_s=times)


def with_bands(
    best: Mapping[str, PredictedRun],
    runs: Sequence[MlperfRun],
    host: MlperfHost,
    options: Mapping[str, LoadGenOption],
    at: Bench,
) -> dict[str, PredictedRun]:
    """With bands: all op times slower, and faster, by the other cells' error, and by that of a GPU
    whose tables are another's."""
    lent = np.log1p(LENT_PCT["gemm"] / 100)
    factors: dict[str, list[float]] = {}
    for run in runs:
        off = np.hypot(NORMAL_90 * host.error_without(run.cell), lent * (run.gpu in SLOWER))
        factors[run.id] = np.exp(off * np.array([1, -1])).tolist()
    found = search_all({options[id]: _at_rate(options[id], factors[id]) for id in best}, at)
    banded = {}
    for id, one in best.items():
        if not isinstance(ends := found[options[id]], str):
            numbers = {key: _band(*(each[key] for each in ends)) for key in LATENCIES}
            load = one.capacity
            numbers[CAPACITY] = _band(load, *(load / factor for factor in factors[id]))
            banded[id] = replace(one, numbers=numbers)
    return banded


def search_all(searches: Mapping[LoadGenOption, Search[T]], at: Bench) -> dict[Option, T | str]:
    """The results of searches, or errors; those with the same limits at a time."""
    by_limits: dict[str, dict[Option, Search[T]]] = {}
    for option, one in searches.items():
        by_limits.setdefault(option.slo, {})[option] = one
    found: dict[Option, T | str] = {}
    for slo, group in by_limits.items():
        section = CapacitySection(slo=slo, tolerance=TOLERANCE)
        lab = Laboratory(section, at.store, at.backend, at.progress, at.say)
        found |= lab.pursue(group, len(found), len(searches))
    return found


def _at_rate(
    option: LoadGenOption, factors: Sequence[float] = ()
) -> Search[list[dict[str, float]]]:
    """Latencies at the run's own rate, in ms by column: as predicted, and with op times scaled."""
    rate, plan = option.natural_rate, option.plan
    at = yield [Probe(rate, plan.seed, plan.requests, slower) for slower in (1.0, *factors)]
    return [
        {key: 1e3 * float(probed.summary[m][s]) for key, (m, s) in LATENCIES.items()}
        for probed in at
    ]


def _predicted(option: LoadGenOption) -> Search[PredictedRun]:
    plan = option.plan
    found = yield from search.pilot(plan)
    if isinstance(found, search.Crossing):
        like = Probe(0, plan.seed, plan.requests)
        found = yield from search.crossing(like, found.load, found.slope, plan)
    if not isinstance(found, search.Crossing):
        raise search.UnbreakableError("no load keeps the limits")
    (at,) = yield from _at_rate(option)
    # It is run before it is said.
    load, _, verdict = yield from search.kept_at(plan, found.load, [found])
    at[CAPACITY] = load if verdict.holds else found.kept.probe.load
    stresses = found.broken.verdict.stresses
    worst = max(stresses, key=stresses.__getitem__)
    numbers = {key: _band(value) for key, value in at.items()}
    return PredictedRun(numbers, "ttft" if "ttft" in worst else "tpot")


def half_widths(rows: pd.DataFrame) -> dict[str, float]:
    """The half-widths that cover 90 % of further runs (:func:`covering_width`): for dense models
    from their rows; for mixtures of experts, of which there are too few, from all."""
    errors = np.abs(_log_errors(rows))
    dense = ~rows["cell"].map(is_mixture).to_numpy(bool)
    groups = {"dense": errors[dense], "mixture": errors}
    return {name: covering_width(of, UNKNOWN) for name, of in groups.items()}


def within_error(rows: pd.DataFrame) -> list[bool]:
    """Whether each row lies within the half-width that is fitted without its cell."""
    found = []
    for cell, error in zip(rows["cell"], np.abs(_log_errors(rows)), strict=True):
        others = half_widths(rows[rows["cell"] != cell])
        found.append(bool(error <= others["mixture" if is_mixture(cell) else "dense"]))
    return found


def fitted_error(rows: pd.DataFrame) -> CapacityDiscrepancy:
    """What the table says, today: ``data/capacity_error.yaml``."""
    dense = sum(not is_mixture(cell) for cell in rows["cell"])
    return CapacityDiscrepancy(
        f"{len(rows)} runs of MLPerf Inference that stopped at a limit, {dense} of dense models",
        today(),
        half_widths(rows),
        sum(within_error(rows)),
    )


def _log_errors(rows: pd.DataFrame) -> Floats:
    measured, predicted = (rows[f"{of}_per_s"].to_numpy(float) for of in ("measured", "predicted"))
    return np.asarray(np.log(measured / predicted))
