"""An engine that is a simulation, so that what is measured on it is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sarathi_sim.experiments.lab.engines.cells import Cell
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.engine.driver import Decision, Served
from sarathi_sim.profiler.engine.processes import EngineRun, StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS, GridWork
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.loop.records import Records, Switches
from tests.simulator import simulate

SEND_S, TURNAROUND_S = float(quantize(2e-4)), float(quantize(3e-4))


@dataclass
class FakeEngine:
    """Its layers take milliseconds by the tokens, and ``factor`` times that in real work."""

    cell: Cell
    factor: float = 1.0
    offset_s: float = 0.0
    seen: list[Decision] = field(default_factory=list)

    def layer_s(self, tokens: int, decodes: int, context: int) -> float:
        """One layer: 1 us a token; decodes 1 us each and 0.1 us a KV token on top."""
        return 1e-4 + 1e-6 * tokens + 1e-6 * decodes + 1e-7 * context

    def __call__(self, batch: Batch) -> tuple[float, float, float, float]:
        """What the simulator asks of a predictor; also remembers the batch."""
        self.seen.append(Decision.of(batch, 0.0))
        layers = self.cell.layers
        offset = self.offset_s * len(layers) / sum(layers)
        layer = self.layer_s(batch.num_tokens, batch.num_decodes, batch.decode_context)
        return (
            float(quantize(offset + self.factor * layer)),
            float(quantize(self.factor * 2e-4)),
            float(quantize(self.factor * 5e-4)),
            SEND_S,
        )

    def serve(self, requests: Sequence[Request]) -> tuple[EngineRun, Records]:
        """The run as an engine would log it, and as it was simulated."""
        self.seen = []
        records = simulate(
            requests, [self.cell.scheduler()], self, self.cell.layers,
            switches=Switches(lazy=True, turnaround_s=TURNAROUND_S),
        )  # fmt: skip
        log = records.replicas[0]
        times = stage_times(log)
        for number, decision in enumerate(self.seen):
            decision.clock_s = float(log.iterations["ready_s"][number])
            decision.returned_s = float(log.iterations["finish_s"][number]) + TURNAROUND_S
        arrived = times.start.copy()
        ops = np.zeros((*times.start.shape, len(TIMED_OPS) + 2))
        stages = StageLog(arrived, times.start, times.finish, times.finish - times.start, ops)
        spans = log.spans.ravel().tolist()
        served = Served(decisions=list(self.seen), spans=spans)
        served.outputs = {request.id: [0] * request.output_tokens for request in requests}
        return EngineRun(served, stages), records

    def play(self, works: Sequence[GridWork]) -> StageLog:
        """The grid: what is not attention is half in preproj and half in others."""
        layers = np.array(self.cell.layers, float)
        rows, begin = [], 0.0
        ops = np.zeros((len(works), len(layers), len(TIMED_OPS) + 2))
        for number, (chunks, decodes) in enumerate(works):
            tokens = sum(chunk[1] for chunk in chunks) + len(decodes)
            context = sum(context for _, context in decodes)
            attention = self.layer_s(0, len(decodes), context) - self.layer_s(0, 0, 0)
            layer = self.layer_s(tokens, len(decodes), context)
            ops[number, :, TIMED_OPS.index("preproj")] = layers * (layer - attention) / 2
            name = "attn_decode" if decodes else "attn_prefill"
            ops[number, :, TIMED_OPS.index(name)] = layers * attention
            ops[number, :, len(TIMED_OPS)] = layers * layer
            ops[number, -1, len(TIMED_OPS) + 1] = 5e-4
            service = layers * layer
            service[0] += 2e-4
            service[-1] += 5e-4
            rows.append((begin, service))
            begin += float(service.max())
        start = np.array([[at] * len(layers) for at, _ in rows])
        took = np.array([service for _, service in rows])
        return StageLog(start, start, start + took, took, ops)
