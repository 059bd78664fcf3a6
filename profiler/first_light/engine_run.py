"""The torch engine beside the simulator: ``sarathi-sim validate`` as a program of its own."""

from __future__ import annotations

import json
import runpy
import sys
from unittest import mock

from sarathi_sim.profiler.first_light.probe_machine import open_machine
from sarathi_sim.profiler.first_light.steps import Found, Task
from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.storage.files import write_whole

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

    It is in bf16, as the profiles are, so that their times predict its runs, too.

    Raises ProfileError where batches differ. The command line is a room above this one, hence it
    is run by its name, in this process: then it ends with the step.
    """
    kind = open_machine(task)[0].type
    config, settings = "validate_gpu", ["validation.repeats=3", "validation.dtype=bfloat16"]
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
