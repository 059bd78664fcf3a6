"""Predicted times of an engine's micro-batches: from its bundle alone, and calibrated in situ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sarathi_sim.experiments.validate.playback import links, stage_times
from sarathi_sim.experiments.validate.session import Cell
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.policy import chunking_of
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.request import Sequence as Member
from sarathi_sim.profiler.engine.driver import Decision
from sarathi_sim.profiler.engine.processes import EngineRun
from sarathi_sim.simulator.loop.pipeline import nominal_times
from sarathi_sim.simulator.loop.quantum import quantize
from sarathi_sim.simulator.loop.records import Floats, Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.loop.switches import Switches
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor


@dataclass(frozen=True)
class Links:
    """Seconds around the stages' work, medians over calibration runs.

    ``send_s`` to the next stage, ``turnaround_s`` from the last stage's finish until rank 0 had
    handled it, ``decide_s`` that a decision takes of the first stage's time.
    """

    send_s: float
    turnaround_s: float
    decide_s: float

    @staticmethod
    def of(runs: Sequence[EngineRun]) -> Links:
        """The links measured in these runs."""
        found = [links(run) for run in runs]
        decide = [
            run.stages.start[:, 0] - [decision.clock_s for decision in run.served.decisions]
            for run in runs
        ]
        sends = [sends.mean() if len(sends) else 0.0 for sends, _ in found]
        return Links(
            float(np.median(sends)),
            float(np.median([turnaround for _, turnaround in found])),
            float(np.median(np.concatenate(decide))),
        )


@dataclass(frozen=True)
class StageTimePrediction:
    """``offset_s + factor *`` the bundle's time of a stage; (0, 1) is the bundle alone."""

    cell: Cell
    bundle: BundlePredictor
    links: Links
    offset_s: float = 0.0
    factor: float = 1.0

    def __call__(self, batch: Batch) -> tuple[float, float, float, float]:
        """What the simulator asks; see :class:`~sarathi_sim.simulator.loop.replica.Predictor`."""
        layer_s, first_s, last_s, send_s = self.bundle(batch)
        layers = self.cell.layers
        offset = self.offset_s * len(layers) / sum(layers)  # a stage's, spread over its layers
        times = (
            max(0.0, offset + self.factor * layer_s),
            self.factor * (first_s + self.links.decide_s),
            self.factor * last_s,
            send_s,
        )
        layer, first, last, send = (float(quantize(t)) for t in times)
        return layer, first, last, send

    def stages(self, decisions: Sequence[Decision], requests: Sequence[Request]) -> Floats:
        """Predicted seconds of every micro-batch on every stage, shape (batches, stages)."""
        members = {r.id: Member(r.id, r.prompt_tokens, r.max_tokens, 0) for r in requests}
        rows = []
        for decision in decisions:
            chunks = tuple((members[i], n, context) for i, n, context in decision.chunks)
            tokens = sum(n for _, n, _ in chunks)
            batch = Batch(
                decision.group,
                chunks,
                tokens,
                len(decision.decodes),
                decision.decode_context,
                decision.longest_context,
            )
            rows.append(nominal_times(self.cell.layers, *self(batch))[0])
        return np.array(rows)

    def simulate(self, requests: Sequence[Request]) -> Records:
        """The open loop, without any number of the measured run."""
        return simulate(
            requests,
            [self.cell.scheduler(requests)],
            self,
            self.cell.layers,
            switches=Switches(lazy=True, turnaround_s=self.links.turnaround_s),
        )

    def calibrated(self, runs: Sequence[tuple[EngineRun, list[Request]]]) -> StageTimePrediction:
        """With offset and factor fitted to the relative errors of other runs' stage times."""
        predicted, measured = [], []
        for run, requests in runs:
            times = stage_times(run)
            measured.append((times.finish - times.start).ravel())
            predicted.append(self.stages(run.served.decisions, requests).ravel())
        x, y = np.concatenate(predicted), np.concatenate(measured)
        terms = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
        (offset, factor), *_ = np.linalg.lstsq(terms, np.ones_like(y), rcond=None)
        return StageTimePrediction(self.cell, self.bundle, self.links, float(offset), float(factor))


def _most_rows(cell: Cell) -> int:
    """Tokens of a micro-batch that holds several chunks."""
    chunking = chunking_of(cell.scenario.policy.build())
    return 0 if chunking is None else chunking.rows + cell.sequences


def bundle_predictor(cell: Cell, ops: OpTimes) -> BundlePredictor:
    """The cell's, over the op times of its engine."""
    return BundlePredictor(
        ops,
        max_tokens=max(2 * cell.max_length, _most_rows(cell)),
        max_length=cell.max_length,
        max_batch=cell.sequences,
        scope="intra_node",
        num_stages=len(cell.layers),
    )
