"""Rows for whose bands other schedules matter: simulated again under joint draws.

Where the KV cache is full, requests wait for memory. Then slower ops or a smaller cache change who
runs beside whom, which no share of the ops in a row's time can say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.experiments.score.measured import METRICS, Measured
from sarathi_sim.experiments.score.row_cache import RowCache, RowOutcome
from sarathi_sim.experiments.score.server_bands import DRAWS, HOST, HOST_SIGMA, NORMAL_90, normals
from sarathi_sim.experiments.score.simulated import FULL, Variant, plan_rows, simulate_rows
from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.simulator.loop.records import Floats

REDRAWS = 8
"""Simulations of each such row: pairs of draws with opposite signs."""
BLOCKS_SIGMA = float(np.log1p(0.05)) / NORMAL_90
"""Of the KV blocks: 5 % either way, about one percent of a GPU's memory. Assumed."""


def redrawn(
    file: str,
    rows: Sequence[Measured],
    described: Variant,
    outcomes: Mapping[str, RowOutcome],
    where: tuple[Path, RowCache],
    backend: Backend,
    progress: Progress,
    say: Say,
) -> dict[str, dict[str, Floats]]:
    """Logarithms of the factors on a row's times under each draw, by id and metric, of the rows
    whose KV cache was full in ``outcomes``; ``described`` is what those were simulated as."""
    full = [
        row
        for row in rows
        if row.id in outcomes and outcomes[row.id].numbers["kv_peak_share"] >= FULL
    ]
    variants: dict[str, Variant] = {
        f"draw {n}": partial(drawn, described, outcomes, n) for n in range(REDRAWS)
    }
    plan = plan_rows(file, full, progress, variants, where[1])
    simulate_rows(plan, where[0], backend, progress, say)
    found = {}
    for row in full:
        numbers = [known[row.id].numbers for known in plan.known.values() if row.id in known]
        if len(numbers) == REDRAWS:
            base = outcomes[row.id].numbers
            found[row.id] = {
                metric: np.resize(
                    [np.log(one[f"{metric}_ms"] / base[f"{metric}_ms"]) for one in numbers], DRAWS
                )
                for metric in METRICS
            }
    return found


def drawn(
    described: Variant, outcomes: Mapping[str, RowOutcome], number: int, row: Measured
) -> dict[str, Any] | None:
    """The scenario of a row under one draw of op errors, host time and KV blocks."""
    scenario, outcome = described(row), outcomes[row.id]
    if scenario is None or outcome.shares is None:
        return None
    half = REDRAWS // 2
    at = number if number < half else DRAWS // 2 + number - half

    def factor(name: str, sigma: float) -> float:
        return float(np.exp(sigma * normals(name)[at]))

    engine, host = dict(scenario["engine"]), factor(HOST, HOST_SIGMA)
    for key in ("host_iteration_s", "host_sequence_s"):
        engine[key] *= host
    ops = {op: factor(op, sigma) for op, sigma in outcome.shares.sigmas.items() if op != HOST}
    blocks = round(outcome.numbers["num_blocks"] * factor("KV blocks", BLOCKS_SIGMA))
    cache = {**scenario["kv_cache"], "num_blocks": blocks}
    return {**scenario, "engine": {**engine, "op_scale": ops}, "kv_cache": cache}
