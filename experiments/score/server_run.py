"""A real server's run, request by request: the files of load tools, and its simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pandas as pd
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.bundle.csv_cells import numbers, read_cells
from sarathi_sim.profiler.storage.files import LARGEST_DATA, read_bounded
from sarathi_sim.simulator.load.workload import make_requests
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import Analysis

TOOL_SEED = 0
"""The seed that ``benchmark_serving`` takes unless another is given."""
_TICK_COLUMNS = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")
TICK_LABELS = {
    "running": "requests running, mean",
    "waiting": "requests waiting, mean",
    "kv_cache_pct": "KV cache in use, mean (%)",
    "decode_ms": "iteration of decodes alone, nobody waiting (ms)",
}

_Count = Annotated[int, Field(ge=1, le=2**24)]
_Time = Annotated[float, Field(ge=0, le=1e12)]
_READING = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", populate_by_name=True)


class _Line(BaseModel):
    model_config = _READING

    input_toks: _Count
    output_toks: _Count
    queued_ts: _Time
    first_token_ts: _Time
    last_token_ts: _Time


class _Benchmark(BaseModel):
    model_config = _READING

    request_rate: Literal["inf"] | Annotated[float, Field(gt=0)]
    burstiness: Annotated[float, Field(gt=0)] = 1.0
    input_lens: Annotated[list[_Count], Field(min_length=1)]
    output_lens: list[_Count]
    ttfts: list[_Time] = Field(validation_alias=AliasChoices("ttfts", "ttfts_s"))
    itls: list[list[_Time]] = Field(validation_alias=AliasChoices("itls", "itls_s"))

    def arrivals(self) -> Floats:
        """When the tool sends its requests: its gaps are drawn one by one from numpy's legacy
        generator, the first request is sent at once."""
        count = len(self.input_lens)
        if self.request_rate == "inf":
            return np.zeros(count)
        scale = 1 / (self.request_rate * self.burstiness)
        gaps = np.random.RandomState(TOOL_SEED).gamma(self.burstiness, scale, count - 1)
        return np.concatenate([[0.0], np.cumsum(gaps)])


_Kind = TypeVar("_Kind", bound=BaseModel)


@dataclass(frozen=True, eq=False)
class ServerRun:
    """What was measured, a row a request in order of arrival; ``requests`` has ``arrival_s``,
    ``prompt_tokens``, ``output_tokens``, ``ttft_s``, ``tpot_s`` (NaN for one token) and
    ``latency_s``, times in seconds after the first arrival."""

    requests: pd.DataFrame

    def for_scenario(self, scenario: Scenario, max_length: int, source: Source) -> list[Request]:
        """Its requests, instead of the ``workload`` section's; they declare what they generate."""
        rows = self.requests
        longest = int((rows["prompt_tokens"] + rows["output_tokens"]).max())
        if longest > max_length:
            problem = f"must be at least {longest}, the longest request of the run"
            raise source.error("cluster.max_length", max_length, problem)
        columns = (
            rows[name].to_numpy() for name in ("arrival_s", "prompt_tokens", "output_tokens")
        )
        return make_requests(*columns, max_length=max_length, declare_exact=True)


def read_server_run(path: Path) -> ServerRun:
    """The run in a file. Raises ConfigError, naming file, line and key, where it is not one."""
    content = read_bounded(path, LARGEST_DATA)
    if path.suffix == ".json":
        return _benchmark(path, content)
    return _lines(path, content)


def _benchmark(path: Path, content: bytes) -> ServerRun:
    found = _checked(_Benchmark, content, str(path))
    count = len(found.input_lens)
    for key in ("output_lens", "ttfts", "itls"):
        if len(getattr(found, key)) != count:
            raise ConfigError(f"{path}: {key}: must have {count} entries, as input_lens has")
    return _run(
        found.arrivals(),
        np.array(found.input_lens),
        np.array(found.output_lens),
        np.array(found.ttfts),
        np.array([sum(gaps) for gaps in found.itls]),
    )


def _lines(path: Path, content: bytes) -> ServerRun:
    rows = []
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        line = _checked(_Line, text, f"{path}: line {number}")
        if not line.queued_ts < line.first_token_ts <= line.last_token_ts:
            order = "queued_ts, first_token_ts and last_token_ts must follow each other"
            raise ConfigError(f"{path}: line {number}: {order}")
        rows.append(line.model_dump())
    if not rows:
        raise ConfigError(f"{path}: holds no requests")
    frame = pd.DataFrame(rows).sort_values("queued_ts", kind="stable", ignore_index=True)
    names = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
    prompt, output, queued, first, last = (frame[name].to_numpy() for name in names)
    return _run(queued - queued.min(), prompt, output, first - queued, last - first)


def _run(arrival_s: Floats, prompt: Any, output: Any, ttft_s: Floats, rest_s: Floats) -> ServerRun:
    return ServerRun(
        pd.DataFrame(
            {
                "arrival_s": arrival_s,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "ttft_s": ttft_s,
                "tpot_s": rest_s / np.where(output > 1, output - 1, np.nan),
                "latency_s": ttft_s + rest_s,
            }
        )
    )


def _checked(kind: type[_Kind], content: bytes, where: str) -> _Kind:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "the line"
        raise ConfigError(f"{where}: {key}: {problem['msg']}") from None


@dataclass(frozen=True, eq=False)
class Ticks:
    """A row a tick: ``t`` (s), ``prompt`` and ``generated`` tokens since the tick before, and
    ``running``, ``waiting``, ``kv_cache_pct`` at it."""

    t: Floats
    prompt: Floats
    generated: Floats
    running: Floats
    waiting: Floats
    kv_cache_pct: Floats

    def means(self) -> dict[str, float | None]:
        """Means over ticks; ``decode_ms`` is the time of an iteration while only decodes run:
        between ticks without prompts at which nobody waits."""
        calm = (self.waiting[1:] == 0) & (self.waiting[:-1] == 0) & (self.prompt[1:] == 0)
        calm &= self.generated[1:] > 0
        decoding_s = ((self.running[1:] + self.running[:-1]) / 2 * np.diff(self.t))[calm].sum()
        tokens = self.generated[1:][calm].sum()
        found = {key: float(getattr(self, key).mean()) for key in TICK_LABELS if key != "decode_ms"}
        return {**found, "decode_ms": float(1e3 * decoding_s / tokens) if tokens else None}


def read_ticks(path: Path) -> Ticks:
    """The ticks of a file. Raises ConfigError, naming file, row and column."""
    raw = read_cells(path)
    missing = [name for name in _TICK_COLUMNS if name not in raw.columns]
    if missing:
        raise ConfigError(f"{path}: column {missing[0]} is missing; has {', '.join(raw.columns)}")
    columns = [numbers(raw[name], path) for name in _TICK_COLUMNS]
    if len(raw) < 2 or (np.diff(columns[0]) <= 0).any():
        raise ConfigError(f"{path}: t must grow from row to row, over two rows at least")
    return Ticks(*columns)


MEASURES = ("ttft_s", "tpot_s", "latency_s")
STATISTICS = ("mean", "p50", "p90", "p99")
NUMBERS = (
    *("makespan_s", "output_tokens_per_s"),
    *(f"{key}.{each}" for key in MEASURES for each in STATISTICS),
)
COUNTS = ("preemptions", "hit_rate", "num_blocks")


def replay_server(
    experiment: Experiment, run: ServerRun, ticks: Ticks | None = None
) -> dict[str, Any]:
    """Every scenario under the run's requests, beside what was measured.

    ``measured`` and each of ``scenarios`` hold the :data:`MEASURES` (mean and quantiles over
    requests, seconds) and ``makespan_s``. A scenario also has ``off_pct``, how far each is from
    the measured one, ``per_request_pct``, the median over requests of the absolute difference,
    ``preemptions``, ``hit_rate`` and, with paged memory, ``num_blocks``; ``notes`` are what to
    know of it. With ``ticks`` both have the keys of :data:`TICK_LABELS`, too. Raises ConfigError as
    :func:`deploy` does.
    """
    deployments = {
        name: deploy(from_queue(scenario), experiment.sources[name], run.for_scenario)
        for name, scenario in experiment.scenarios.items()
    }
    measured = numbers_of(run.requests) | (ticks.means() if ticks is not None else {})
    scenarios = {}
    for name, deployment in deployments.items():
        analysis = Analysis(deployment.simulate())
        tables, more = (analysis.iterations, analysis.requests), dict[str, Any]()
        if ticks is not None:
            more = simulated_ticks(ticks.t, *tables, deployment.kv_capacity).means()
        found = beside(analysis.requests, run, measured, more)
        scenarios[name] = found | counts_of(deployment, analysis)
    return {"requests": len(run.requests), "measured": measured, "scenarios": scenarios}


def from_queue(scenario: Scenario) -> Scenario:
    """Without the frontend, unless it is given: what lies before the scheduler is not in every
    recorded run."""
    engine = scenario.engine.model_copy(update={"frontend_s": scenario.engine.frontend_s or 0.0})
    return scenario.model_copy(update={"engine": engine})


def beside(
    table: pd.DataFrame, run: ServerRun, measured: Mapping[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    """The numbers of simulated requests, and ``more``; how far they are off ``measured``."""
    found = {**numbers_of(table), **more}
    off = {key: _median_off(table[key], run.requests[key]) for key in MEASURES}
    return {**found, "off_pct": _off(found, measured), "per_request_pct": off}


def counts_of(deployment: Deployment, analysis: Analysis) -> dict[str, Any]:
    """The :data:`COUNTS` of a simulation, as far as it has them, and its ``notes``."""
    tp, cache = deployment.scenario.cluster.tp, deployment.scenario.kv_cache
    counts = analysis.summary(deployment.model, deployment.device, tp)
    counts |= {"num_blocks": cache.num_blocks} if cache is not None else {}
    found = {key: counts[key] for key in COUNTS if key in counts}
    return {**found, "notes": list(deployment.remarks)}


def numbers_of(table: pd.DataFrame) -> dict[str, Any]:
    """The :data:`NUMBERS` of a table of requests, measured or simulated."""
    makespan = float((table["arrival_s"] + table["latency_s"]).max())
    found: dict[str, Any] = {
        "makespan_s": makespan,
        "output_tokens_per_s": int(table["output_tokens"].sum()) / makespan,
    }
    for key in MEASURES:
        values = table[key].dropna().to_numpy(np.float64)
        quantiles = np.quantile(values, [0.5, 0.9, 0.99]).tolist() if len(values) else [None] * 3
        mean = float(values.mean()) if len(values) else None
        found[key] = dict(zip(STATISTICS, [mean, *quantiles], strict=True))
    return found


def _off(found: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Percent, number by number."""
    return {
        key: _off(found[key], value)
        if isinstance(value, dict)
        else None
        if not value or found[key] is None
        else 100 * (found[key] / value - 1)
        for key, value in measured.items()
    }


def _median_off(found: pd.Series[float], measured: pd.Series[float]) -> float:
    return float((100 * (found / measured - 1).abs()).median())


def simulated_ticks(
    t: Floats, iterations: pd.DataFrame, requests: pd.DataFrame, kv_capacity: int
) -> Ticks:
    """What the server's log would be of a simulated run: at the times ``t``, from its tables and
    the KV tokens that it has room for."""
    size = (iterations["chunks"] + iterations["decodes"]).to_numpy(np.float64)
    start, finish = (iterations[name].to_numpy() for name in ("start_s", "finish_s"))
    running = _until(t, start, size) - _until(t, finish, size)
    arrival, one = requests["arrival_s"].to_numpy(), np.ones(len(requests))
    inside = _until(t, arrival, one) - _until(t, arrival + requests["latency_s"].to_numpy(), one)
    formed = np.searchsorted(np.sort(start), t, "right") - 1
    kv_tokens = iterations["kv_tokens"].to_numpy(np.float64)[np.argsort(start, kind="stable")]
    in_use = np.where(running > 0, kv_tokens[np.maximum(formed, 0)], 0.0)
    prompt, generated = (
        np.diff(_until(t, finish, iterations[name].to_numpy(np.float64)), prepend=0.0)
        for name in ("prefill_tokens", "decodes")
    )
    share = 100 * in_use / kv_capacity
    return Ticks(t, prompt, generated, running, inside - running, share)


def _until(t: Floats, when: Floats, amount: Floats) -> Floats:
    """The amounts of everything that happened by each time."""
    order = np.argsort(when, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(amount[order])])
    return np.asarray(total[np.searchsorted(when[order], t, "right")])
