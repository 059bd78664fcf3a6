"""The totals of a run that a validation compares."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.views.ledger import WAITS
from sarathi_sim.simulator.views.metrics import Analysis


@dataclass(frozen=True)
class Whole:
    """A run in totals. Bubbles are those of the ledger, communication and turn-around included."""

    makespan_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    bubble_s: float
    bubble_by_stage_s: tuple[float, ...]
    bubble_per_request_s: float

    @staticmethod
    def of(records: Records) -> Whole:
        """The totals of a simulated or a measured run."""
        analysis = Analysis(records)
        table = analysis.requests
        stages = [
            sum(float(row[f"{name}_s"]) for name in WAITS) for _, row in analysis.ledger.iterrows()
        ]
        tokens = int(records.prompt_tokens.sum() + records.output_tokens.sum())
        makespan = records.end_s - float(records.arrival_s.min())
        return Whole(
            makespan,
            tokens / makespan,
            float(table["ttft_s"].quantile(0.5)),
            float(table["ttft_s"].quantile(0.9)),
            sum(stages),
            tuple(stages),
            float(table["bubble_s"].mean()),
        )


def off(simulated: float, measured: float) -> float:
    """The relative error; NaN if the measured value is 0 (a run without bubbles, for example)."""
    return simulated / measured - 1 if measured else float("nan")
