"""Which shipped device this GPU is, and what its published tables give. Imports torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from sarathi_sim.profiler.bundle.schema import Bundle, write_bundle
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device, shipped_device
from sarathi_sim.profiler.facts.formats import Kernels, Stack
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import SCOPES
from sarathi_sim.profiler.first_light.steps import Task
from sarathi_sim.profiler.physics.shard_times import ShardTimes, asked_at
from sarathi_sim.profiler.planning.profile_error import ProfileError

#: Whose tables a rehearsal without a GPU takes.
_STAND_IN = "h100-80g-sxm"


def data_sheet(kind: str) -> DeviceSpec | None:
    """The shipped device that this GPU is, or None; on a CPU, where it is a rehearsal, another."""
    return (
        shipped_device("", torch.cuda.get_device_name())
        if kind == "cuda"
        else load_device(_STAND_IN)
    )


def published_stacks(kind: str) -> tuple[str, list[Stack]]:
    """The shipped device that this GPU is, and the stacks whose kernels on it ship, vLLM's first.

    Raises ProfileError where none do.
    """
    from sarathi_sim.profiler.kernels.stack_file import stacks_on

    device = data_sheet(kind)
    if device is None or not stacks_on(device.name):
        raise ProfileError("no kernels of this GPU ship, so there is nothing published to take")
    return device.name, sorted(stacks_on(device.name), key=lambda stack: stack != "vllm")


def published_times(device: str, model: ModelSpec, tp: int, stack: Stack) -> ShardTimes:
    """The shipped kernels of a stack for a model's shard in bf16."""
    from sarathi_sim.profiler.kernels.stack_times import StackTimes

    return StackTimes(device, Kernels(stack), model, tp)


def published_collectives(task: Task, kind: str, model: ModelSpec, tp: int) -> Path:
    """A bundle with the collectives of vLLM (or another stack) on this GPU, and few other points.

    Raises ProfileError where none ship.
    """
    device, stacks = published_stacks(kind)
    path = task.folder / "published" / model.name / f"tp{tp}"
    times, few = published_times(device, model, tp, stacks[0]), np.array([1, 1024])
    messages = pd.DataFrame({"num_bytes": 2 ** np.arange(10, 32)})
    sizes = Bundle(
        times.meta,
        pd.DataFrame([(op, n) for op in sorted(model.row_ops) for n in few]).set_axis(
            ["op", "num_tokens"], axis=1
        ),
        pd.DataFrame({"chunk_tokens": few, "context_tokens": 0}),
        pd.DataFrame({"batch_size": few, "context_tokens": 1024}),
        messages if tp > 1 else messages[:0],
        pd.concat(messages.assign(scope=scope) for scope in SCOPES),
    )
    write_bundle(asked_at(times, sizes), path, force=True)
    return path
