"""Score of recorded runs: each beside its simulation without host time (``zero``: nothing fitted),
with the configuration's host time (``configured``, if it gives one), with a host time fitted to all
the configuration's runs (``fitted``), and with one fitted to its other runs (``left_out``, if there
are any)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.child import Progress
from ..run.compare import comparison
from .replay import MEASURES, Case, Overheads, Simulated
from .tune import fit, too_fast

BATCHES = 4
"""Groups of requests by the number of requests that ran beside them."""


@dataclass(frozen=True, eq=False)
class ScoredRun:
    """A run beside its simulations by name (see the module's docstring); ``overheads`` has each
    simulation's time outside of the GPUs."""

    case: Case
    simulated: Mapping[str, Simulated]
    overheads: Mapping[str, Overheads]

    def content(self) -> dict[str, Any]:
        """Its numbers; ``remains`` divides the difference in the mean latency, ``by_batch`` has the
        time per output token by the number of requests beside."""
        case = self.case
        content: dict[str, Any] = {
            "scenario": case.scenario,
            "requests": len(case.run.requests),
            "measured": case.measured,
            "too_fast": too_fast(case),
        }
        for name, one in self.simulated.items():
            outside = self.overheads[name]
            content[name] = {
                **one.beside(case.run, case.measured),
                "overheads": asdict(outside),
            }
        return content | {"remains": self._remains(), "by_batch": self._by_batch()}

    def _remains(self) -> dict[str, Any]:
        """The residual of the mean latency without host time, in seconds, in parts.

        ``host`` is the effect of all fitted constants but ``frontend``, the fitted time outside of
        the engine; direct and indirect (``parts``, as in ``compare``). Of the rest,
        ``first_token`` is before the first token (scheduling, admission, prompts), ``later_tokens``
        after it (ops, and host time of another shape).
        """
        zero, fitted = (self.simulated[name] for name in ("zero", "fitted"))
        frontend_s = self.overheads["fitted"].frontend_s
        tables = (self.case.run.requests, zero.requests, fitted.requests)
        (ttft, latency), (_, before), (first, after) = (
            (float(table["ttft_s"].mean()), float(table["latency_s"].mean())) for table in tables
        )
        both = comparison(zero.compared("zero"), fitted.compared("fitted"))
        parts = both["mean_latency"]["parts"]
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

    def _by_batch(self) -> list[dict[str, Any]]:
        """Groups of equally many requests: the median of requests beside, and mean times per output
        token."""
        columns = {"running": self.case.beside, "measured_s": self.case.run.requests["tpot_s"]}
        columns |= {f"{n}_s": s.requests["tpot_s"] for n, s in self.simulated.items()}
        table = pd.DataFrame(columns).dropna().sort_values("running", ignore_index=True)
        groups = [table.iloc[each] for each in np.array_split(np.arange(len(table)), BATCHES)]
        return [
            {
                "requests": len(rows),
                "running": float(rows["running"].median()),
                **{name: float(rows[name].mean()) for name in columns if name != "running"},
            }
            for rows in groups
            if len(rows)
        ]


@dataclass(frozen=True, eq=False)
class ScoredRuns:
    """All runs of a configuration."""

    runs: Sequence[ScoredRun]

    def content(self) -> dict[str, Any]:
        """As ``score --json`` prints it: ``runs`` by name, and what served them."""
        served = {each.case.name: each.case.deployment for each in self.runs}
        return {
            "deployments": {
                name: {"model": one.model.name, "device": one.device.name}
                for name, one in served.items()
            },
            "runs": {each.case.name: each.content() for each in self.runs},
        }

    def write(self, folder: Path) -> None:
        """``requests.csv``, a row a request: its run, lengths, and the measures as measured and as
        simulated."""
        tables = []
        for each in self.runs:
            rows = each.case.run.requests
            columns: dict[str, Any] = {"run": each.case.name, "request": np.arange(len(rows))}
            columns |= {
                name: rows[name] for name in ("arrival_s", "prompt_tokens", "output_tokens")
            }
            columns |= {f"measured_{key}": rows[key] for key in MEASURES}
            for name, one in each.simulated.items():
                columns |= {f"{name}_{key}": one.requests[key] for key in MEASURES}
            tables.append(pd.DataFrame(columns))
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
        variants = {"zero": Overheads(), "configured": case.configured}
        variants["fitted"] = together[case.server]
        if case.configured == Overheads():
            del variants["configured"]
        if others := [each for each in alike if each is not case]:
            variants["left_out"] = fit(others, case.configured).overheads
        runs = {name: case.under(overheads) for name, overheads in variants.items()}
        found.append(ScoredRun(case, runs, variants))
    progress("fits", len(cases), len(cases))
    return ScoredRuns(found)
