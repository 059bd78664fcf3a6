"""The steps that profile models' shards, and compare: with published tables, and the torch engine
with the simulator. Imports torch.
"""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.diff import OpDiff, diff_bundles
from sarathi_sim.profiler.bundle.schema import (
    Bundle,
    bundle_path,
    list_bundles,
    load_bundle,
    write_bundle,
)
from sarathi_sim.profiler.facts.formats import Kernels, Stack
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.facts.ops import SCOPES
from sarathi_sim.profiler.first_light.machine_steps import data_sheet, open_machine
from sarathi_sim.profiler.first_light.steps import STEPS, Found, Task
from sarathi_sim.profiler.measuring.measure import profile
from sarathi_sim.profiler.physics.shard_times import ShardTimes, asked_at
from sarathi_sim.profiler.planning.journal import ProfileError
from sarathi_sim.profiler.planning.settings import AttentionChoice, Limits, Settings, default_limits
from sarathi_sim.profiler.shard import environment as machine
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.files import write_whole


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


#: Of a step's limit: when points that refine are no longer added. Of what is left of it: when
#: nothing more is measured. The rest is for the start and for writing.
_FOR_POINTS, _AT_MOST = 0.5, 0.8
#: The seconds of ``validate`` for its start, before the engine's, and for its report.
_FOR_REPORT_S = 75.0
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


def tables(task: Task) -> Found:
    """Every bundle of the folder beside vLLM's, SGLang's and TensorRT-LLM's kernels.

    ``lines`` are for the summary: of the shards of TP 1 with xformers, the median difference of our
    times from the tables', by op. Raises ProfileError where there is nothing to compare.
    """
    gpu, stacks = published_stacks(open_machine(task)[0].type)
    facts: dict[str, object] = {}
    lines: list[str] = []
    names = list_bundles(task.profiles) if task.profiles.is_dir() else []
    for device, model, tp in names:
        ours = load_bundle(bundle_path(task.profiles, device, model, tp))
        spec = ours.meta.model_spec
        for stack in stacks:
            theirs = asked_at(published_times(gpu, spec, tp, stack), ours)
            diffs, left_out = diff_bundles(theirs, ours)
            what = f"{device}/{model}/tp{tp} over {stack}"
            facts[what] = {diff.op: vars(diff) for diff in diffs} | {"not compared": left_out}
            line = f"{what}, %: {', '.join(_percent(diff) for diff in diffs if diff.points > 1)}"
            print(line)  # noqa: T201
            if tp == 1 and device == names[0][0]:  # the first has no attention behind its name
                lines.append(line)
    if not facts:
        raise ProfileError("no bundle was measured, so there is nothing to compare")
    return Found(f"{len(facts)} comparisons in results/tables.json", {**facts, "lines": lines})


def _percent(diff: OpDiff) -> str:
    """The median difference, as in "attn_decode +7"."""
    return f"{diff.op} {100 * (diff.median - 1):+.0f}"


#: A rehearsal's model, and its configuration but for that and the device.
_MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
_SMALL = """\
name: rehearsal
workload: {requests: 2, lengths: {kind: fixed, total: 32}, pd_ratio: 7}
cluster: {max_length: 32}
batching: {max_batch: 2, formation: lazy}
policy: {name: sarathi, chunk_size: 16, tile: 16}
scenarios: {sarathi: {}}
validation: {repeats: 1, calibration_requests: 1}
"""


def validate(task: Task) -> Found:
    """Run ``validate_gpu`` with three repeats (a rehearsal: something small) into ``validation``.

    It is in bf16, as the profiles are, so that their times predict its runs, too. A repeat that
    may not end within the step's time is left out, so that the others' report is written.

    Raises ProfileError where batches differ. The command line is a room above this one, hence it
    is run by its name, in this process: then it ends with the step.
    """
    kind = open_machine(task)[0].type
    config, settings = "validate_gpu", ["validation.repeats=3", "validation.dtype=bfloat16"]
    settings.append(f"validation.limit_s={max(1.0, task.seconds - _FOR_REPORT_S):.0f}")
    if task.rehearsal:
        small, settings = task.folder / "rehearsal.yaml", []
        model = (task.folder / "rehearsal.json").resolve()
        write_whole(model, json.dumps(_MODEL))
        write_whole(small, f"{_SMALL}device: {kind}\nmodel: {json.dumps(str(model))}\n")
        config = str(small)
    arguments = ["validate", config, "--out", str(task.folder / "validation"), "--no-figures"]
    arguments += ["--profiles", str(task.profiles)]
    arguments += [word for setting in settings for word in ("--set", setting)]
    with mock.patch.object(sys, "argv", ["sarathi-sim", *arguments]):
        try:
            runpy.run_module("sarathi_sim", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise ProfileError(
                    f"validate {config}: exit code {end.code}; see its log"
                ) from None
    return Found("batches agree; times in validation/validation.json")
