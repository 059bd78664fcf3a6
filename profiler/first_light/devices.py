"""Which shipped device this GPU is, and what its published tables give. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch

from sarathi_sim.profiler.bundle.schema import Bundle, write_bundle
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device, shipped_device
from sarathi_sim.profiler.facts.formats import Kernels, Stack
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.first_light.steps import Task
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


def published_bundle(device: str, model: ModelSpec, tp: int, stack: Stack) -> Bundle:
    """The shipped kernels of a stack for a model's shard in bf16."""
    from sarathi_sim.profiler.kernels.stack_bundle import make_stack_bundle

    return make_stack_bundle(device, model, tp, Kernels(stack), max_tokens=8192)


def published_collectives(task: Task, kind: str, model: ModelSpec, tp: int) -> Path:
    """The bundle of vLLM's kernels (or another stack's) on this GPU, written for its collectives.

    Raises ProfileError where none ship.
    """
    device, stacks = published_stacks(kind)
    path = task.folder / "published" / model.name / f"tp{tp}"
    write_bundle(published_bundle(device, model, tp, stacks[0]), path, force=True)
    return path
