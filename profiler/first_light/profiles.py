"""The steps that profile a model's shard: ``sarathi-sim profile`` with settings of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sarathi_sim.profiler.bundle.schema import bundle_path
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.first_light.devices import published_collectives
from sarathi_sim.profiler.first_light.probe_machine import open_machine
from sarathi_sim.profiler.first_light.steps import STEPS, Found, Task
from sarathi_sim.profiler.measuring.measure import profile
from sarathi_sim.profiler.planning.settings import AttentionChoice, Limits, Settings, default_limits
from sarathi_sim.profiler.shard import environment as machine
from sarathi_sim.profiler.storage.progress import silent

#: Of a step's limit: when points that refine are no longer added. Of what is left of it: when
#: nothing more is measured. The rest is for the start and for writing.
_FOR_POINTS, _AT_MOST = 0.5, 0.8
_TINY = Limits(max_tokens=6, max_context=32, max_batch=2)  # the fewest points of all kinds


@dataclass(frozen=True)
class ProfiledShard:
    """What one step profiles. Bundles of an attention other than xformers, and of other weights,
    are of a device of their own, named after it. The collectives of ``tp`` above 1 are published
    ones."""

    model: str
    attention: AttentionChoice = "xformers"
    tp: int = 1
    weights: Literal["dtype", "fp8"] = "dtype"

    @property
    def suffix(self) -> str:
        """Behind the device's name."""
        attention = "" if self.attention == "xformers" else f"-{self.attention}"
        return attention + ("" if self.weights == "dtype" else f"-{self.weights}")


PROFILES = {
    "llama-13b": ProfiledShard("llama-13b"),
    "llama-13b-sdpa": ProfiledShard("llama-13b", "sdpa"),
    "llama-13b-cudnn": ProfiledShard("llama-13b", "cudnn"),
    "llama-3-8b": ProfiledShard("llama-3-8b"),
    "llama-3-8b-tp2": ProfiledShard("llama-3-8b", tp=2),
    "llama-3-8b-tp4": ProfiledShard("llama-3-8b", tp=4),
    "fp8": ProfiledShard("llama-3-8b", weights="fp8"),
}


def _tiny(name: str) -> ModelSpec:
    """A small model with the name of another, and as many KV heads as query heads if that has."""
    tiny, model = load_model("tiny-llama-40m"), load_model(name)
    share = model.num_heads // model.num_kv_heads
    return replace(tiny, name=f"tiny-{name}", num_kv_heads=max(4, tiny.num_heads // share))


def profile_one(step: str, task: Task) -> Found:
    """Profile the shard of a step into the folder's ``profiles``. Raises ProfileError."""
    shard = PROFILES[step]
    device, dtype = open_machine(task)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    model = _tiny(shard.model) if task.rehearsal else load_model(shard.model)
    attention = shard.attention if kind == "cuda" else "sdpa"
    name = machine.default_device_name(kind) + shard.suffix
    path = bundle_path(task.profiles, name, model.name, shard.tp)
    found = Found(f"{path.relative_to(task.folder)}, {attention}")
    if (path / "meta.yaml").is_file() and (task.profiles / f"{name}.yaml").is_file():
        return found  # this step was killed between its last file and its entry in the ledger
    limit_s = next(each.limit_s for each in STEPS if each.name == step)
    collectives: Path | None = None
    if shard.tp > 1:
        collectives = published_collectives(task, kind, model, shard.tp)
    settings = Settings(
        model=model,
        tps=(shard.tp,),
        device=kind,
        dtype="bfloat16" if str(dtype) == "torch.bfloat16" else "float32",
        out=task.profiles,
        limits=_TINY if task.rehearsal else default_limits(kind, model.max_position_embeddings),
        device_name=name,
        budget_s=0.0 if task.rehearsal else _FOR_POINTS * limit_s,
        repeats=1 if task.rehearsal else 5,
        flush=task.facts("methods").get("flush", "read"),
        max_s=_AT_MOST * task.seconds,
        sustained_s=0.01 if task.rehearsal else 20.0,
        collectives=collectives,
        attention=attention,
        weights=shard.weights if kind == "cuda" else "dtype",
    )
    profile(settings, print, silent)
    return found
