"""A rank as on a GPU, on the CPU: ``python -m tests.profiler_torch.device_ranks_main``.

Activations travel apart from their words, and waiting for the device takes a while.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from sarathi_sim.profiler.engine import rank as engine_rank
from sarathi_sim.profiler.engine.rank import Compute
from sarathi_sim.profiler.engine.spec import EngineSpec

WAIT_S = 5e-3


@dataclass(frozen=True)
class SlowToFinish(Compute):
    """Waiting for the device takes time, which belongs to the work that is waited for."""

    def wait(self) -> None:
        time.sleep(WAIT_S)


def stand_in(spec: EngineSpec, number: int) -> Compute:
    assert spec.device == "cuda"
    return SlowToFinish(torch.device("cpu"), getattr(torch, spec.dtype), "gloo", apart=True)


def no_facts(device: str, threads: int) -> dict[str, Any]:
    return {"gpu": f"stand-in for {device}"}


if __name__ == "__main__":
    engine_rank.open_compute = stand_in
    engine_rank.facts = no_facts
    engine_rank.main()
