"""Which shipped device this GPU is, and what its published tables give. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch

from profiler.bundle.schema import Bundle, write_bundle
from profiler.facts.device import DeviceSpec, load_device, shipped_device
from profiler.facts.formats import Kernels
from profiler.facts.model import ModelSpec
from profiler.first_light.steps import Task
from profiler.planning.profile_error import ProfileError

#: Whose tables a rehearsal without a GPU takes.
_STAND_IN = "h100-80g-sxm"


def data_sheet(kind: str) -> DeviceSpec | None:
    """The shipped device that this GPU is, or None; on a CPU, where it is a rehearsal, another."""
    return (
        shipped_device("", torch.cuda.get_device_name())
        if kind == "cuda"
        else load_device(_STAND_IN)
    )


def published_bundles(kind: str, model: ModelSpec, tp: int) -> dict[str, Bundle]:
    """A bundle by stack: the shipped kernels of this GPU, for a model's shard in bf16.

    Raises ProfileError where no kernels of this GPU ship.
    """
    from profiler.kernels.stack_bundle import make_stack_bundle
    from profiler.kernels.stack_file import stacks_on

    device = data_sheet(kind)
    if device is None or not stacks_on(device.name):
        raise ProfileError("no kernels of this GPU ship, so there is nothing published to take")
    return {
        stack: make_stack_bundle(device.name, model, tp, Kernels(stack), max_tokens=8192)
        for stack in stacks_on(device.name)
    }


def published_collectives(task: Task, kind: str, model: ModelSpec, tp: int) -> Path:
    """The bundle of vLLM's kernels (or another stack's) on this GPU, written for its collectives.

    Raises ProfileError where none ship.
    """
    bundles = published_bundles(kind, model, tp)
    bundle = bundles.get("vllm") or next(iter(bundles.values()))
    path = task.folder / "published" / model.name / f"tp{tp}"
    write_bundle(bundle, path, force=True)
    return path
