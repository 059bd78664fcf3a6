"""The report of a validation on real vLLM, and the predictor from a grid of its own steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.interpolate import RegularGridInterpolator

from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.run.decision_log import ENGINES, DecisionLog, Replay, replay
from sarathi_sim.experiments.validate.differences import MOST_DRIFT, PREDICTIONS, off
from sarathi_sim.experiments.validate.session import Cell
from sarathi_sim.experiments.validate.summary import (
    FEWEST_REPEATS,
    head,
    judged,
    middle,
    middles,
    spread_of,
)
from sarathi_sim.experiments.validate.vllm_session import (
    VllmCell,
    VllmRepeat,
    VllmRun,
    VllmSession,
    engine_arguments,
)
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.simulator.loop.quantum import quantize
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.loop.switches import Switches
from sarathi_sim.simulator.views.metrics import Analysis

COLUMNS = ("decodes", "context", "prompt", "seconds", "step_s")
"""Of a grid's rows; ``seconds`` includes what it takes to add the prompt's request."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step; a sum over the requests that it adds is ``add_s`` each."""

    surface: RegularGridInterpolator
    add_s: float

    @staticmethod
    def of(*grids: Sequence[Sequence[float]]) -> StepTimes:
        """From the rows of grids; medians over the times that each cell was run.

        The first half of a grid's rows have the short contexts.
        """
        tables = [pd.DataFrame(rows, columns=list(COLUMNS)) for rows in grids]
        table = pd.concat([each.assign(long=each.index >= len(each) // 2) for each in tables])
        decodes, prompts = sorted(table["decodes"].unique()), sorted(table["prompt"].unique())
        busy = table[table["decodes"] > 0]
        contexts = busy.groupby("long")["context"].median().to_numpy()
        cells = table.groupby(["decodes", "long", "prompt"])["step_s"].median()
        prefill = table[table["decodes"] == 0].groupby("prompt")["step_s"].median()
        values = np.empty((len(decodes), 2, len(prompts)))
        for i, count in enumerate(decodes):
            for j, far in enumerate((False, True)):
                for k, tokens in enumerate(prompts):
                    alone = not count and tokens
                    if alone:
                        values[i, j, k] = prefill[tokens]
                    elif count:
                        values[i, j, k] = cells[count, far, tokens]
        one, two = prompts[1:3]  # a step of nothing, from those of few tokens
        values[0, :, 0] = prefill[one] - (prefill[two] - prefill[one]) * one / (two - one)
        surface = RegularGridInterpolator(
            (decodes, contexts, prompts), values, bounds_error=False, fill_value=None
        )
        added = table[table["prompt"] > 0]
        return StepTimes(surface, float((added["seconds"] - added["step_s"]).median()))

    def __call__(self, steps: Floats) -> Floats:
        """Seconds of steps: rows of decodes, their mean context, prompt tokens, requests added."""
        rows = np.atleast_2d(steps)
        return np.asarray(self.surface(rows[:, :3]) + self.add_s * rows[:, 3])


def steps_of(served: VllmRun) -> Floats:
    """The measured steps as :class:`StepTimes` takes them."""
    prompt = {request.id: request.prompt_tokens for request in served.requests}
    rows = []
    for event in served.run["events"]:
        if event[0] != "schedule":
            continue
        batch = event[2]
        contexts = [done for number, done, _ in batch if done >= prompt[number]]
        chunks = [(done, tokens) for number, done, tokens in batch if done < prompt[number]]
        mean = sum(contexts) / len(contexts) if contexts else 0.0
        tokens = sum(tokens for _, tokens in chunks)
        rows.append([len(contexts), mean, tokens, sum(done == 0 for done, _ in chunks)])
    return np.array(rows, float)


def seconds_of(served: VllmRun) -> Floats:
    """The measured seconds of its steps, each with the requests that it added."""
    steps = np.array(served.run["steps"])
    return np.asarray(steps[:, 2] - steps[:, 0])


def between_s(served: VllmRun) -> float:
    """Median seconds from one step's end to the next one's begin."""
    steps = np.array(served.run["steps"])
    gaps = steps[1:, 0] - steps[:-1, 2]
    return float(np.median(gaps)) if len(gaps) else 0.0


@dataclass(frozen=True)
class StepPrediction:
    """``offset_s + factor *`` the grid's time of a step; (0, 1) is the grid alone."""

    cell: Cell
    times: StepTimes
    turnaround_s: float
    offset_s: float = 0.0
    factor: float = 1.0

    def of(self, steps: Floats) -> Floats:
        """Seconds of steps; see :meth:`StepTimes.__call__`."""
        return np.asarray(np.maximum(0.0, self.offset_s + self.factor * self.times(steps)))

    def __call__(self, batch: Batch) -> tuple[float, float, float, float]:
        """What the simulator asks; see :class:`~sarathi_sim.simulator.loop.replica.Predictor`."""
        decodes = batch.num_decodes
        mean = batch.decode_context / decodes if decodes else 0.0
        added = sum(context == 0 for _, _, context in batch.chunks)
        step = np.array([decodes, mean, batch.prefill_tokens, added], float)
        return float(quantize(self.of(step)[0])), 0.0, 0.0, 0.0

    def simulate(self, requests: Sequence[Request]) -> Records:
        """The open loop, without any number of the measured run."""
        pools = [self.cell.scheduler(requests)]
        return simulate(
            requests, pools, self, (1,), switches=Switches(turnaround_s=self.turnaround_s)
        )

    def calibrated(self, runs: Sequence[VllmRun]) -> StepPrediction:
        """With offset and factor fitted to other runs' steps, by errors relative to the prediction.

        Errors relative to the measurement would favour short times where those are noisy.
        """
        predicted = np.concatenate([self.of(steps_of(run)) for run in runs])
        measured = np.concatenate([seconds_of(run) for run in runs])
        factor, offset = np.polyfit(predicted, measured, 1, w=1 / predicted)
        return replace(self, offset_s=float(offset), factor=float(factor))


LAYOUT = "vllm"
TARGETS = {
    "iteration_error_median": 0.05,
    "iteration_error_p90": 0.15,
    "ttft_error": 0.10,
    "tpot_error": 0.05,
    "throughput_error": 0.05,
}
"""How far a prediction may be off; decided beforehand."""


@dataclass(frozen=True)
class Outcome:
    """One cell in one repeat. ``iterations`` and ``whole`` are by prediction."""

    parity: Replay
    steps: Floats
    measured_iterations: Floats
    iterations: dict[str, Floats]
    measured: dict[str, float]
    whole: dict[str, dict[str, float]]


Outcomes = dict[str, list[Outcome]]
"""Of each cell, repeat by repeat."""


def decision_log(cell: Cell, served: VllmRun) -> DecisionLog:
    """The run's decisions as ``lockstep`` takes them."""
    engine, pool = engine_arguments(cell), cell.scenario.policy.described()
    settings = {name: engine[name] for name in ("block_size", "max_num_seqs", "watermark")}
    settings |= {name: engine[name] for name in ("max_num_batched_tokens", "max_model_len")}
    settings |= {
        "num_blocks": engine["num_gpu_blocks_override"],
        "chunked": engine["enable_chunked_prefill"],
        "caching": engine["enable_prefix_caching"],
        "policy": engine["scheduling_policy"],
        "threshold": engine["long_prefill_token_threshold"],
        "adaptive": bool(pool.get("adaptive_threshold")),
        "reserve_full_isl": engine["scheduler_reserve_full_isl"],
        "async_sched": False,
        "v2": False,
        "pp": 1,
    }
    rows = [
        [r.id, r.arrival_s, r.prompt_tokens, r.output_tokens, 0, -1, 0] for r in served.requests
    ]
    events = served.run["events"]
    version = str(pool.get("version", "0.32"))
    return DecisionLog(Path(cell.name), ENGINES["vllm"], version, 1, settings, rows, events)


def totals(arrival: Floats, first: Floats, last: Floats, output: Floats) -> dict[str, float]:
    """Mean TTFT, TPOT (of requests with several tokens) and latency; output tokens a second."""
    many = output > 1
    return {
        "ttft": float((first - arrival).mean()),
        "tpot": float(((last - first)[many] / (output - 1)[many]).mean()),
        "latency": float((last - arrival).mean()),
        "throughput": float(output.sum() / last.max()),
    }


def measured_totals(served: VllmRun) -> dict[str, float]:
    """Of the run as vLLM served it."""
    arrival = np.array([request.arrival_s for request in served.requests])
    output = np.array([request.output_tokens for request in served.requests])
    first, last = np.array(served.run["times"]).T
    return totals(arrival, first, last, output)


def evaluate(repeat: VllmRepeat, cell: Cell, served: VllmCell) -> Outcome:
    """Everything about one cell in one repeat."""
    times = StepTimes.of(*repeat.grids)
    turnaround = float(np.median([between_s(run) for run in served.calibration]))
    alone = StepPrediction(cell, times, turnaround)
    predictions = {"grid": alone, "calibrated": alone.calibrated(served.calibration)}
    steps, whole = steps_of(served.run), {}
    for name, prediction in predictions.items():
        found = Analysis(prediction.simulate(served.run.requests)).request_columns
        arrival = found["arrival_s"]
        first, last = arrival + found["ttft_s"], arrival + found["latency_s"]
        whole[name] = totals(arrival, first, last, found["output_tokens"])
    return Outcome(
        parity=replay(decision_log(cell, served.run)),
        steps=steps,
        measured_iterations=seconds_of(served.run),
        iterations={name: each.of(steps) for name, each in predictions.items()},
        measured=measured_totals(served.run),
        whole=whole,
    )


def evaluate_all(session: VllmSession, progress: Progress) -> Outcomes:
    """Every cell in every repeat."""
    found: Outcomes = {}
    for done, repeat in enumerate(session.repeats):
        progress("simulations", done, len(session.repeats))
        for cell in session.cells:
            found.setdefault(cell.name, []).append(evaluate(repeat, cell, repeat.served[cell.name]))
    progress("simulations", len(session.repeats), len(session.repeats))
    return found


def drift(repeat: VllmRepeat) -> float:
    """The grid's time after the repeat over that before it, cell by cell (1: no drift)."""
    before, after = (
        pd.DataFrame(rows).groupby([0, 2])[4].median().to_numpy() for rows in repeat.grids
    )
    return float(np.median(after / before))


def report(experiment: Experiment, session: VllmSession, outcomes: Outcomes) -> dict[str, Any]:
    """The content of ``validation.json``."""
    moved = [drift(repeat) for repeat in session.repeats]
    rejected = [
        {"repeat": n, "why": f"the grid took {one:.2f} times as long after as before"}
        for n, one in enumerate(moved)
        if abs(one - 1) > MOST_DRIFT
    ]
    kept = [n for n, one in enumerate(moved) if abs(one - 1) <= MOST_DRIFT]
    shares = [
        run.wall_over_cpu
        for repeat in session.repeats
        for served in repeat.served.values()
        for run in (served.run, *served.calibration)
    ]
    quiet = len(kept) >= FEWEST_REPEATS
    result: dict[str, Any] = {
        **head(experiment),
        "clock": "CPU time of the engine's process, idle time skipped",
        "quiet": quiet,
        "repeats": {
            LAYOUT: {
                "run": len(moved),
                "accepted": len(kept),
                "quiet": quiet,
                "rejected": rejected,
                "drift": moved,
                "load_average": [repeat.load for repeat in session.repeats],
                "wall_over_cpu": middle(shares),
                "seconds": session.seconds,
                "engine": session.about,
            }
        },
        "cells": {cell.name: _cell(cell, outcomes[cell.name], kept) for cell in session.cells},
        "ratios": {},
    }
    return result | {"targets": _targets(result["cells"], quiet)}


def _cell(cell: Cell, repeats: Sequence[Outcome], kept: Sequence[int]) -> dict[str, Any]:
    """All repeats are listed; statistics are over the accepted ones, or all where none was."""
    some = [repeats[n] for n in kept] or list(repeats)
    differences = [o.parity.first_difference for o in repeats if o.parity.first_difference]
    entry: dict[str, Any] = {
        "layout": LAYOUT,
        "online": True,
        "requests": len(cell.requests()),
        "scenario": cell.scenario.model_dump(mode="json"),
        "iterations": sum(o.parity.decisions for o in repeats),
        "parity": sum(o.parity.identical for o in repeats)
        / max(1, sum(o.parity.decisions for o in repeats)),
        "first_difference": next(iter(differences), None),
        "measured": middles([o.measured for o in some]),
    }
    for name in PREDICTIONS:
        each = [_errors(o, name) for o in repeats]
        entry[name] = middles([_errors(o, name) for o in some]) | {"repeats": each}
    return entry | {key: entry["calibrated"][key] for key in TARGETS}


def _errors(outcome: Outcome, prediction: str) -> dict[str, float]:
    errors = np.abs(outcome.iterations[prediction] / outcome.measured_iterations - 1)
    found, measured = outcome.whole[prediction], outcome.measured
    return spread_of(errors) | {f"{key}_error": off(found[key], measured[key]) for key in measured}


def _targets(cells: Mapping[str, Any], quiet: bool) -> list[dict[str, Any]]:
    """Limit, value and whether it was met; None if the machine was too busy."""
    rows = []
    for name, cell in cells.items():
        rows += judged("parity", name, 0.0, cell["parity"] - 1, may=True)
        for what, limit in TARGETS.items():
            rows += judged(what, name, limit, cell[what]["median"], may=quiet)
    return rows


def iterations(outcomes: Outcomes) -> pd.DataFrame:
    """Every step of every repeat: what it held, measured and predicted seconds."""
    return pd.concat(
        [
            pd.DataFrame(outcome.steps, columns=["decodes", "context", "prompt_tokens", "added"])
            .assign(cell=name, repeat=number, measured_s=outcome.measured_iterations)
            .assign(**{f"{key}_s": times for key, times in outcome.iterations.items()})
            for name, repeats in outcomes.items()
            for number, outcome in enumerate(repeats)
        ],
        ignore_index=True,
    )
