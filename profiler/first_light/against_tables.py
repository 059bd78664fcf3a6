"""What was measured beside the shipped kernels of this GPU, op by op, in percent."""

from __future__ import annotations

from sarathi_sim.profiler.bundle.diff import OpDiff, diff_bundles
from sarathi_sim.profiler.bundle.schema import bundle_path, list_bundles, load_bundle
from sarathi_sim.profiler.first_light.devices import published_stacks, published_times
from sarathi_sim.profiler.first_light.probe_machine import open_machine
from sarathi_sim.profiler.first_light.steps import Found, Task
from sarathi_sim.profiler.physics.shard_times import asked_at
from sarathi_sim.profiler.planning.profile_error import ProfileError


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
