"""Which shipped device this GPU is, and what its published tables give. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch

from profiler.bundle.schema import Bundle, write_bundle
from profiler.facts.device import list_devices, load_device
from profiler.facts.formats import Kernels
from profiler.facts.model import ModelSpec
from profiler.first_light.steps import Task
from profiler.planning.profile_error import ProfileError

#: Whose tables a rehearsal without a GPU takes.
_STAND_IN = "h100-80g-sxm"


def shipped_device(kind: str) -> str | None:
    """The shipped device with this GPU's product name and memory; None where there is none.

    On a CPU, where only rehearsals run, a stand-in.
    """
    if kind != "cuda":
        return _STAND_IN
    words = set(torch.cuda.get_device_name().lower().replace("-", " ").split())
    memory = torch.cuda.get_device_properties(0).total_memory
    found = [
        (abs(load_device(name).memory_bytes - memory), name)
        for name in list_devices()
        if name.split("-")[0] in words
    ]
    return min(found)[1] if found else None


def published_bundles(kind: str, model: ModelSpec, tp: int) -> dict[str, Bundle]:
    """A bundle by stack: the shipped kernels of this GPU, for a model's shard in bf16.

    Raises ProfileError where no kernels of this GPU ship.
    """
    from profiler.kernels.stack_bundle import make_stack_bundle
    from profiler.kernels.stack_file import stacks_on

    name = shipped_device(kind)
    if name is None or not stacks_on(name):
        raise ProfileError("no kernels of this GPU ship, so there is nothing published to take")
    return {
        stack: make_stack_bundle(name, model, tp, Kernels(stack), max_tokens=8192)
        for stack in stacks_on(name)
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
