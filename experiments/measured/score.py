"""Score of recorded runs: each beside its simulation without host time (``zero``: nothing fitted),
with the configuration's (``configured``, if it gives one), with one fitted to all its runs
(``fitted``), and with one fitted to its other runs (``left_out``, if there are any). The second, or
without it the first, is what was predicted before the run: it has bands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.formats import named_stack
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.simulator.confidence.op_errors import NORMAL_90
from ..config.deployment import Deployment
from ..config.inputs import DEFAULTS, StackErrors, host_times
from ..run.compare import comparison
from ..run.uncertainty import op_time_factors
from .replay import MEASURES, NUMBERS, Case, Overheads, Simulated, number_at, numbers_of
from .tune import fit, too_fast

HOST = 2.0
"""The 90 % band of the host's times: a factor either way, assumed (docs/lab/servers_method.md)."""
REPEATS = 0.01
"""No band is narrower, as a share: a server's runs do not repeat better (assumed)."""


def errors_of(deployment: Deployment) -> StackErrors | None:
    """Errors of servers of its stack beyond those of op times and host; None without a stack."""
    stack, mixture = deployment.pools[-1].scenario.stack, deployment.model.experts is not None
    return host_times(mixtures=mixture).errors[named_stack(stack)[0]] if stack else None


def bands_of(case: Case, plain: Simulated, overheads: Overheads) -> dict[str, list[float]]:
    """The 90 % bands of the :data:`NUMBERS` of a simulation with these ``overheads``, by path.

    A band joins independent causes, by the root of the sum of their squares: the run again with all
    ops slower, and faster, by the errors of op times and the stack's own of TPOT; with the host's
    times longer and shorter (:data:`HOST`); and the stack's own error of TTFT, which is in a
    latency, too. Errors of a server's means count for its percentiles (assumed)."""
    errors = errors_of(plain.deployment) or StackErrors(0.0, 0.0)
    low, high = map(math.log, op_time_factors(plain.deployment, plain.analysis))
    beyond = NORMAL_90 * errors.tpot
    ends = (math.exp(math.hypot(high, beyond)), math.exp(-math.hypot(low, beyond)))
    causes: list[tuple[tuple[str, ...], tuple[float, float]]] = [(("kernels", "links"), ends)]
    if host := tuple(key for key in DEFAULTS if getattr(overheads, key)):
        causes.append((host, (HOST, 1 / HOST)))
    own = numbers_of(plain.requests)
    runs = [
        [
            case.numbers(replace(overheads, **{key: by * getattr(overheads, key) for key in keys}))
            for by in factors
        ]
        for keys, factors in causes
    ]
    of_ttft = [math.expm1(sign * NORMAL_90 * errors.ttft) for sign in (1, -1)]
    found = {}
    for path in NUMBERS:
        if (value := number_at(own, path)) is None:
            continue
        key, _, statistic = path.partition(".")
        ttft = own["ttft_s"][statistic] if key in ("ttft_s", "latency_s") else 0.0
        moved = [[(number_at(one, path) or 0.0) - value for one in pair] for pair in runs]
        moved.append([ttft * share for share in of_ttft])
        up = math.hypot(*(max(0.0, *pair) for pair in moved))
        down = math.hypot(*(min(0.0, *pair) for pair in moved))
        least = REPEATS * value
        found[path] = [max(0.0, value - max(down, least)), value + max(up, least)]
    return found


def predicted(simulated: Mapping[str, Any]) -> str:
    """The simulation that knew nothing of the runs, of those by name."""
    return "configured" if "configured" in simulated else "zero"


@dataclass(frozen=True, eq=False)
class ScoredRun:
    """A run beside its simulations by name (see the module's docstring); ``overheads`` has each
    simulation's time outside of the GPUs, ``bands`` are those of the predicted one."""

    case: Case
    simulated: Mapping[str, Simulated]
    overheads: Mapping[str, Overheads]
    bands: Mapping[str, list[float]]

    def content(self) -> dict[str, Any]:
        """Its numbers; ``check`` has the predicted ones, by path, with their 90 % band and whether
        it holds the measured one (``stack_error``: standard deviations of logarithms that
        :func:`bands_of` adds for the stack), ``remains`` divides the mean latency's difference."""
        case, errors = self.case, errors_of(self.case.deployment)
        content: dict[str, Any] = {
            "scenario": case.scenario,
            "requests": len(case.run.requests),
            "measured": case.measured,
            "too_fast": too_fast(case),
            "check": self._check(),
            "stack_error": None if errors is None else asdict(errors),
        }
        for name, one in self.simulated.items():
            beside = one.beside(case.run, case.measured)
            content[name] = beside | {"overheads": asdict(self.overheads[name])}
        return content | {"remains": self._remains()}

    def _check(self) -> dict[str, Any]:
        before, found = numbers_of(self.simulated[predicted(self.simulated)].requests), {}
        for path, (low, high) in self.bands.items():
            if measured := number_at(self.case.measured, path):
                found[path] = {
                    "predicted": number_at(before, path),
                    "measured": measured,
                    "band": [low, high],
                    "inside": low <= measured <= high,
                }
        return found

    def _remains(self) -> dict[str, Any]:
        """The residual of the mean latency without host time, in seconds, in parts. ``host`` is the
        effect of all fitted constants but ``frontend``, the fitted time outside of the engine;
        direct and indirect (``parts``, as in ``compare``). Of the rest, ``first_token`` is before
        the first token, ``later_tokens`` after it."""
        zero, fitted = (self.simulated[name] for name in ("zero", "fitted"))
        frontend_s = self.overheads["fitted"].frontend_s
        tables = (self.case.run.requests, zero.requests, fitted.requests)
        (ttft, latency), (_, before), (first, after) = (
            (float(table["ttft_s"].mean()), float(table["latency_s"].mean())) for table in tables
        )
        both = comparison(zero.compared("zero"), fitted.compared("fitted"))
        parts = both.get("mean_latency", {"parts": {}})["parts"]
        parts.pop("frontend", None)  # has its own line
        return {
            "latency_s": latency - before,
            "host": after - before - frontend_s,
            "frontend": frontend_s,
            "first_token": ttft - first,
            "later_tokens": (latency - ttft) - (after - first),
            "parts": {name: part["difference_s"] for name, part in parts.items()},
            "predicted_parts": {name: part["a_s"] for name, part in parts.items()},
        }


@dataclass(frozen=True, eq=False)
class ScoredRuns:
    """All runs of a configuration."""

    runs: Sequence[ScoredRun]

    def content(self) -> dict[str, Any]:
        """As ``score --json`` prints it: ``runs`` by name, and what served them."""
        served = {each.case.name: each.case.deployment for each in self.runs}
        about = {n: {"model": d.model.name, "device": d.device.name} for n, d in served.items()}
        runs = {each.case.name: each.content() for each in self.runs}
        return {"deployments": about, "runs": runs}

    def write(self, folder: Path) -> None:
        """``requests.csv``, a row a request: run, lengths, measures as measured and simulated."""
        tables = []
        for each in self.runs:
            rows = each.case.run.requests
            table = rows[["arrival_s", "prompt_tokens", "output_tokens"]].copy()
            table.insert(0, "run", each.case.name)
            table.insert(1, "request", np.arange(len(rows)))
            every = {name: one.requests for name, one in each.simulated.items()}
            for name, of in {"measured": rows, **every}.items():
                table[[f"{name}_{key}" for key in MEASURES]] = of[[*MEASURES]]
            tables.append(table)
        table = pd.concat(tables, ignore_index=True)
        table.to_csv(folder / "requests.csv", index=False, float_format="%.6g")


def score_runs(cases: Sequence[Case], progress: Progress) -> ScoredRuns:
    """Simulate and fit."""
    found, together = [], dict[str, Overheads]()
    for done, case in enumerate(cases):
        progress("fits", done, len(cases))
        alike = [each for each in cases if each.server == case.server]
        if case.server not in together:
            together[case.server] = fit(alike, case.configured).overheads
        own = {"configured": case.configured} if case.configured != Overheads() else {}
        variants = {"zero": Overheads(), **own, "fitted": together[case.server]}
        if others := [each for each in alike if each is not case]:
            variants["left_out"] = fit(others, case.configured).overheads
        runs = {name: case.under(overheads) for name, overheads in variants.items()}
        name = predicted(runs)
        bands = bands_of(case, runs[name], variants[name])
        found.append(ScoredRun(case, runs, variants, bands))
    progress("fits", len(cases), len(cases))
    return ScoredRuns(found)
