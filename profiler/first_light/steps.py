"""The steps of a first hour, in their order, with their limits. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: A step that keeps what it finished begins with less time than its limit, but not with less than
#: this.
_LEAST_S = 60.0


@dataclass(frozen=True)
class HourStep:
    """One step: a process that is killed after ``limit_s`` seconds.

    The hour ends where a ``gate`` fails. A step that ``resumes`` keeps each finished point: killed
    or failed, it goes on from there, and it is tried again as long as it gets further. ``enough_s``
    are the seconds in which a step does less, but ends.
    """

    name: str
    about: str
    limit_s: float
    gate: bool = False
    resumes: bool = False
    enough_s: float | None = None

    @property
    def least_s(self) -> float:
        """The time that must be left for it to begin."""
        enough_s = _LEAST_S if self.resumes else self.enough_s
        return self.limit_s if enough_s is None else min(enough_s, self.limit_s)


PROBE = "probe"
#: The limits of the first five sum up to ten minutes less the start. Importing torch for the first
#: time takes long on a machine that was just started, hence the probe's limit; no other is under a
#: minute.
STEPS = (
    HourStep(PROBE, "torch, xformers, SDPA's kernels, NVML", 90, gate=True),
    HourStep("correctness", "attention against float64, chunks, CUDA graphs", 60, gate=True),
    HourStep("ceilings", "copy bandwidth, a matrix product of 8192", 60, gate=True),
    HourStep("methods", "ways to time an op, compared", 60),
    HourStep("llama-13b", "profile, xformers", 270, resumes=True),
    HourStep("llama-13b-sdpa", "profile, torch SDPA", 240, resumes=True),
    HourStep("llama-13b-cudnn", "profile, cuDNN", 240, resumes=True),
    HourStep("llama-3-8b", "profile, xformers, GQA", 240, resumes=True),
    HourStep("llama-3-8b-tp2", "profile of a shard of TP 2", 180, resumes=True),
    HourStep("llama-3-8b-tp4", "profile of a shard of TP 4", 180, resumes=True),
    HourStep("tables", "beside the shipped kernels of this GPU", 60),
    HourStep("validate", "the engine beside the simulator", 540, enough_s=300),
    HourStep("fp8", "profile with the layers' weights in fp8", 240, resumes=True),
)


@dataclass(frozen=True)
class Task:
    """What a step's process is told: the folder of the hour, its seconds, and whether it is a
    rehearsal, which measures a tiny model, on the CPU where there is no GPU."""

    folder: Path
    seconds: float
    rehearsal: bool

    @property
    def profiles(self) -> Path:
        """The folder of the bundles."""
        return self.folder / "profiles"

    def result(self, step: str) -> Path:
        """The file that a step writes at its end."""
        return self.folder / "results" / f"{step}.json"

    def read(self, step: str) -> dict[str, Any]:
        """The content that a step has written; empty if it has written nothing."""
        try:
            found: dict[str, Any] = json.loads(self.result(step).read_bytes())
        except (OSError, ValueError):
            return {}
        return found

    def facts(self, step: str) -> dict[str, Any]:
        """The facts that a step has found; empty if it found none."""
        found: dict[str, Any] = self.read(step).get("facts", {})
        return found


@dataclass(frozen=True)
class Found:
    """The outcome of a step: a few words for the summary, and all results."""

    headline: str
    facts: dict[str, Any] = field(default_factory=dict)
