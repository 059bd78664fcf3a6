"""A real server's run, request by request, and the simulation of the same requests.

The file is LLMServingSim's ``bench`` form: JSON lines with ``input_toks``, ``output_toks`` and, in
seconds of one clock, ``queued_ts`` (the engine has the request), ``first_token_ts`` and
``last_token_ts``. Other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from experiments.config.deployment import Requests, deploy
from experiments.config.errors import ConfigError
from experiments.config.loading import Experiment, Source
from experiments.config.scenario import Scenario
from experiments.run.server_ticks import Ticks, simulated_ticks
from policies.request import Request
from simulator.load.workload import make_requests
from simulator.views.metrics import Analysis

MEASURES = ("ttft_s", "tpot_s", "latency_s")
STATISTICS = ("mean", "p50", "p90", "p99")
NUMBERS = ("makespan_s", *(f"{key}.{each}" for key in MEASURES for each in STATISTICS))
COUNTS = ("preemptions", "hit_rate", "num_blocks")
_MOST_BYTES = 1 << 28

_Count = Annotated[int, Field(ge=1, le=2**24)]
_Time = Annotated[float, Field(ge=0, le=1e12)]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    input_toks: _Count
    output_toks: _Count
    queued_ts: _Time
    first_token_ts: _Time
    last_token_ts: _Time


@dataclass(frozen=True, eq=False)
class ServerRun:
    """What was measured, a row a request in order of arrival; ``requests`` has ``arrival_s``,
    ``prompt``, ``output`` and the :data:`MEASURES`, times in seconds after the first arrival."""

    requests: pd.DataFrame

    def for_scenario(self, scenario: Scenario, max_length: int, source: Source) -> list[Request]:
        """Its requests, instead of the ``workload`` section's; they declare what they generate."""
        rows = self.requests
        longest = int((rows["prompt"] + rows["output"]).max())
        if longest > max_length:
            problem = f"must be at least {longest}, the longest request of the run"
            raise source.error("cluster.max_length", max_length, problem)
        columns = (rows[name].to_numpy() for name in ("arrival_s", "prompt", "output"))
        return make_requests(*columns, max_length=max_length, declare_exact=True)


def read_server_run(path: Path) -> ServerRun:
    """The run in a file. Raises ConfigError, naming file, line and key, where it is not one."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path}: must be at most {_MOST_BYTES} bytes")
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    rows = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = _Line.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"])) or "the line"
            raise ConfigError(f"{path}: line {number}: {key}: {problem['msg']}") from None
        if not line.queued_ts < line.first_token_ts <= line.last_token_ts:
            order = "queued_ts, first_token_ts and last_token_ts must follow each other"
            raise ConfigError(f"{path}: line {number}: {order}")
        rows.append(line.model_dump())
    if not rows:
        raise ConfigError(f"{path}: holds no requests")
    frame = pd.DataFrame(rows).sort_values("queued_ts", kind="stable", ignore_index=True)
    queued, first, last = (frame[f"{name}_ts"] for name in ("queued", "first_token", "last_token"))
    later = (frame["output_toks"] - 1).where(frame["output_toks"] > 1)
    return ServerRun(
        pd.DataFrame(
            {
                "arrival_s": queued - queued.min(),
                "prompt": frame["input_toks"],
                "output": frame["output_toks"],
                "ttft_s": first - queued,
                "tpot_s": (last - first) / later,
                "latency_s": last - queued,
            }
        )
    )


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
    requests_of: Requests = run.for_scenario
    deployments = {
        name: deploy(scenario, experiment.sources[name], requests_of)
        for name, scenario in experiment.scenarios.items()
    }
    measured = _numbers(run.requests) | (ticks.means() if ticks is not None else {})
    scenarios = {}
    for name, deployment in deployments.items():
        analysis = Analysis(deployment.simulate())
        table = analysis.requests
        found = _numbers(table)
        if ticks is not None:
            log = simulated_ticks(ticks.t, analysis.iterations, table, deployment.kv_capacity)
            found |= log.means()
        tp = deployment.scenario.cluster.tp
        summary = analysis.summary(deployment.model, deployment.device, tp)
        cache = deployment.scenario.kv_cache
        counts = summary | ({"num_blocks": cache.num_blocks} if cache is not None else {})
        scenarios[name] = {
            **found,
            "off_pct": _off(found, measured),
            "per_request_pct": {
                key: _median_off(table[key], run.requests[key]) for key in MEASURES
            },
            **{key: counts[key] for key in COUNTS if key in counts},
            "notes": list(deployment.notes),
        }
    return {"requests": len(run.requests), "measured": measured, "scenarios": scenarios}


def _numbers(table: pd.DataFrame) -> dict[str, Any]:
    found: dict[str, Any] = {"makespan_s": float((table["arrival_s"] + table["latency_s"]).max())}
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
