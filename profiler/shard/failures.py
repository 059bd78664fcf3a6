"""What becomes of a measurement that fails: a Timing that says why. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sarathi_sim.profiler.planning.journal import Timing


def guarded(measure: Callable[[], Timing], device: torch.device) -> Timing:
    """What ``measure`` gives, or a Timing without a time that holds the reason for its failure.

    ``lost`` is set where the GPU answers nothing after it: an illegal access or a failed assertion
    ends a process's CUDA context for good.
    """
    try:
        return measure()
    except Exception as error:  # memory, a library, a kernel that refuses: one point, not a profile
        failed = Timing(None, note=reason(error))
    # The exception is gone, and with it what its frames held.
    return replace(failed, lost=device.type == "cuda" and not _answers())


def reason(error: BaseException) -> str:
    """The type and first line of an error, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _answers() -> bool:
    """Whether the GPU still works for this process; memory that is cached goes back to it."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
