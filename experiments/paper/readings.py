"""Named readings of section 5.3, the spread of each over seeds, and the effect of each switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np

from sarathi_sim.experiments.paper.scenarios import Assumptions, Ratios, ratios
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.profiler.storage.child import mapped, silent
from sarathi_sim.simulator.loop.records import Floats

SEEDS = range(5)
_GRID = "workload.lengths.step=1024"
_BLOCKING = "engine.send=blocking"
_JITTER = "engine.jitter=0.05"


def _turnaround(seconds: float) -> str:
    return f"engine.turnaround_s={seconds}"


@dataclass(frozen=True)
class ScenarioReading:
    """One way to read the paper's scenario, and the reason for it."""

    name: str
    why: str
    assumed: Assumptions


SCENARIO_READINGS = tuple(
    ScenarioReading(name, why, Assumptions(settings, padded))
    for name, why, settings, padded in (
        ("plain", "as described in `experiments/configs/gpt3_pp.yaml`", (), False),
        (
            "lazy-pool",
            "a batch is formed when stage 0 is free, from all requests that are not in flight",
            ("batching.formation=lazy", "batching.micro_batches=free"),
            False,
        ),
        ("blocking", "a stage is occupied while it sends its result on", (_BLOCKING,), False),
        (
            "turnaround",
            "the scheduler needs 5 ms between two iterations of a micro-batch",
            (_turnaround(0.005),),
            False,
        ),
        ("jitter", "stage times vary by 5 %", (_JITTER,), False),
        (
            "padded",
            "the KV cache is pre-allocated for the longest request (section 4.5): a decode's "
            "attention runs over all 4096 tokens of it",
            (),
            True,
        ),
        (
            "padded-engine",
            "padded, with 5 ms of turn-around, 5 % jitter and blocking sends",
            (_turnaround(0.005), _JITTER, _BLOCKING),
            True,
        ),
        (
            "grid",
            "lengths are 1K, 2K, 3K or 4K, the lengths of the other sections",
            (_GRID,),
            False,
        ),
        ("grid-turnaround", "grid, with 5 ms of turn-around", (_GRID, _turnaround(0.005)), False),
        ("grid-padded", "grid and padded", (_GRID,), True),
        (
            "grid-padded-engine",
            "grid and padded, with 5 ms of turn-around, 5 % jitter and blocking sends",
            (_GRID, _turnaround(0.005), _JITTER, _BLOCKING),
            True,
        ),
    )
)


@dataclass(frozen=True)
class Change:
    """One assumption changed, downwards and upwards; a switch has only one direction."""

    name: str
    down: Assumptions | None
    up: Assumptions


def _factor(op: str, label: str) -> Change:
    low, high = (Assumptions(factors=((op, factor),)) for factor in (0.8, 1.25))
    return Change(f"{label} x 0.8 / 1.25", low, high)


def _switch(label: str, *settings: str, padded: bool = False) -> Change:
    return Change(label, None, Assumptions(settings, padded))


_POLICY = "scenarios.sarathi_pp.policy"
CHANGES = (
    _factor("linear", "GEMMs"),
    _factor("prefill", "prefill attention"),
    _factor("decode", "decode attention"),
    _factor("others", "elementwise ops"),
    _factor("all_reduce", "all-reduce"),
    _factor("send", "sends"),
    Change(
        "chunk 128 / 512",
        Assumptions((f"{_POLICY}.chunk_size=128",)),
        Assumptions((f"{_POLICY}.chunk_size=512",)),
    ),
    Change(
        "Zipf theta 0 / 0.8",
        Assumptions(("workload.lengths.theta=0.0",)),
        Assumptions(("workload.lengths.theta=0.8",)),
    ),
    _switch("lengths 1K, 2K, 3K, 4K", _GRID),
    _switch("attention over 4K", padded=True),
    _switch("turn-around 5 ms", _turnaround(0.005)),
    _switch("jitter 5 %", _JITTER),
    _switch("blocking sends", _BLOCKING),
    _switch("formed when stage 0 is free", "batching.formation=lazy"),
    _switch("chunk C - (B - 1)", f"{_POLICY}.chunk_rule=reserve"),
    _switch("Orca unconstrained", "policy.case=unconstrained"),
)


@cache
def _lab() -> Lab:
    """One lab per process: machines are costly to make, and keep their results."""
    return Lab("predicted")


def _one(job: tuple[Assumptions, int]) -> Ratios:
    return ratios(_lab(), *job)


def measure(
    jobs: Iterable[tuple[Assumptions, int]],
    progress: Callable[[int], object] = silent,
    workers: int = 2,
) -> list[Ratios]:
    """The predicted ratios of each (assumptions, seed), in order, on ``workers`` processes."""
    return mapped(_one, jobs, workers, progress)


def spread(results: Iterable[Ratios]) -> tuple[Ratios, Ratios, Ratios]:
    """Median, least and most of each ratio."""
    table: Floats = np.array([astuple(result) for result in results])
    return tuple(  # type: ignore[return-value]
        Ratios(*pick(table, axis=0).tolist()) for pick in (np.median, np.min, np.max)
    )
