"""An engine of several processes: starts the ranks, sends them jobs, reads their logs.

No torch; the ranks are :mod:`sarathi_sim.profiler.engine.rank`. All times of a run are seconds
since it began, by the node's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sarathi_sim.policies.request import Request
from ..shard.rank_processes import RankProcesses
from .driver import Served
from .spec import EngineError, EngineSpec, GridWork, write_spec

Facts = dict[str, str | int | float]
Floats = npt.NDArray[np.float64]
#: Seconds until all ranks must be ready: torch is imported, from a cold disk perhaps, CUDA opened,
#: and weights are drawn.
_START_S = {"cpu": 60.0, "cuda": 600.0}
#: Columns of a rank's log after the work's index.
_ARRIVED, _START, _FINISH, _CPU, _OPS = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class StageLog:
    """The measurements of rank 0 of each stage, shape (micro-batches, stages), in seconds.

    ``arrived``: the arrival of the input (or its receipt, if later); ``start`` and ``finish`` of
    the work with its sends; ``cpu`` the thread's CPU time of the work. ``ops`` has a last axis of
    :data:`~sarathi_sim.profiler.engine.spec.TIMED_OPS`, all layers, and the LM head.
    """

    arrived: Floats
    start: Floats
    finish: Floats
    cpu: Floats
    ops: Floats


@dataclass(frozen=True)
class EngineRun:
    """A finished run: its decisions, and the times of each stage."""

    served: Served
    stages: StageLog


class EngineProcesses:
    """An engine that runs until the context ends. Raises ProfileError where a rank fails, or gives
    no sign of life for ``timeout_s``; no process is left behind. ``environment`` says what it runs
    on, and which attention it uses."""

    def __init__(self, spec: EngineSpec, timeout_s: float = 20.0) -> None:
        self.spec = spec
        self._timeout_s = timeout_s
        self._processes = RankProcesses(
            "sarathi_sim.profiler.engine.rank", self._arguments, spec.ranks, "gloo"
        )

    def _arguments(self, folder: Path) -> Sequence[str]:
        write_spec(self.spec, folder / "spec.json")
        return ["--spec", str(folder / "spec.json")]

    def __enter__(self) -> EngineProcesses:
        self._processes.__enter__()
        try:
            # Importing torch and drawing weights takes longer than any sign of life later on.
            patience_s = max(_START_S[self.spec.device], self._timeout_s)
            self.environment: Facts = self._expect("ready", patience_s)
        except BaseException:
            self._processes.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.__exit__()

    def serve(
        self,
        requests: Sequence[Request],
        policy: dict[str, Any],
        scheduler: dict[str, Any],
        progress: Callable[[int], object] | None = None,
    ) -> EngineRun:
        """Serve requests under a named policy (``{"name": ..., its arguments}``). ``scheduler`` are
        the keyword arguments of :class:`~sarathi_sim.policies.micro_batches.MicroBatches`. Raises
        EngineError if the started engine is too small."""
        many, each = scheduler["max_in_flight"], scheduler["max_batch"]
        if many * each > self.spec.slots:
            raise EngineError(
                f"{many} micro-batches of {each} sequences need more KV slots than the "
                f"{self.spec.slots} that the engine was started with"
            )
        job = {
            "kind": "serve",
            "requests": list(requests),
            "policy": policy,
            "scheduler": scheduler,
        }
        return self._do(job, progress)

    def play(self, works: Sequence[GridWork]) -> StageLog:
        """Execute ``(chunks, decodes)`` of :class:`~sarathi_sim.profiler.engine.spec.Work` one
        after the other, as many in flight as there are stages."""
        return self._do({"kind": "play", "works": works}).stages

    def _do(
        self, job: dict[str, Any], progress: Callable[[int], object] | None = None
    ) -> EngineRun:
        self._processes.send(job)
        served: Served = self._expect("done", self._timeout_s, progress)
        first_ranks = range(0, self.spec.ranks, self.spec.tp)
        tables = [self._expect("rows", self._timeout_s, rank=rank) for rank in first_ranks]
        table = np.stack([np.array(rows, np.float64) for rows in tables], axis=1)
        table[..., [_ARRIVED, _START, _FINISH]] -= served.began
        stages = StageLog(
            table[..., _ARRIVED], table[..., _START], table[..., _FINISH], table[..., _CPU],
            table[..., _OPS:],
        )  # fmt: skip
        return EngineRun(served, stages)

    def _expect(
        self,
        key: str,
        timeout_s: float,
        progress: Callable[[int], object] | None = None,
        rank: int = 0,
    ) -> Any:
        while True:
            entry = self._processes.entry("the engine", timeout_s, rank)
            if entry is None:
                raise EngineError("the engine ended before its job was done")
            if key in entry:
                return entry[key]
            if progress is not None:
                progress(entry["progress"])
