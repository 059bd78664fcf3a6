"""Times of vLLM's steps, from a grid of its own steps: a predictor without ops.

A step's time is interpolated between decodes, their mean context, and prompt tokens; each request
that is added takes a time of its own on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.interpolate import RegularGridInterpolator

from sarathi_sim.experiments.validate.cells import Cell
from sarathi_sim.experiments.validate.vllm_session import VllmRun
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.loop.quantum import quantize
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.loop.switches import Switches

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
