"""A bundle with whole layers and skewed decodes reaches the simulation, and can be told not to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.bundle.schema import (
    TABLES,
    bundle_path,
    load_bundle,
    write_bundle,
)
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.experiments.small_config import message
from tests.sampled import profile_folder

SHARD = ("a100-80g-sxm", "gpt3-175b", 8)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped bundle, with layers that take a third longer and decodes that are padded."""
    root = tmp_path_factory.mktemp("profiles")
    bundle = load_bundle(profile_folder(*SHARD))
    ops = bundle_times(bundle)
    rows = []
    for chunk, batch in ((256, 0), (512, 0), (0, 8), (0, 32), (248, 8), (480, 32)):
        seconds = sum(float(op(chunk + batch)) for op in ops.linear.values())
        seconds += float(ops.prefill(chunk, 0)) if chunk else 0.0
        seconds += float(ops.decode(batch, 512)) if batch else 0.0
        rows.append((chunk, 0, batch, 512 if batch else 0, 4 / 3 * 1e6 * seconds))
    skewed = [(b, 128, 384, 1e6 * float(ops.decode(b, 384))) for b in (4, 8)]
    more = replace(
        bundle,
        mixed=pd.DataFrame(rows, columns=list(TABLES["mixed"].columns)),
        attn_decode_skew=pd.DataFrame(skewed, columns=list(TABLES["attn_decode_skew"].columns)),
    )
    write_bundle(more, bundle_path(root, *SHARD))
    return root


def makespans(config: Path, *assignments: str) -> dict[str, float]:
    experiment = load_experiment(config, assignments)
    return {
        name: float(deployed.simulate().replicas[0].iterations["finish_s"].max())
        for name, deployed in deploy_all(experiment).items()
    }


def test_whole_layers_and_skew_reach_the_simulation(
    write_config: Callable[[], Path], profiles: Path
) -> None:
    config = write_config()
    plain = makespans(config)
    skew_only = makespans(config, f"profiles={profiles}", "engine.layer_time=sum")
    both = makespans(config, f"profiles={profiles}")
    for name, seconds in plain.items():
        # Lengths are uneven, so padding costs, but decode attention is a small part of it all.
        assert seconds < skew_only[name] < 1.1 * seconds
        # All-reduces and transfers do not grow, and the prior holds the third back a little.
        assert 1.15 < both[name] / skew_only[name] < 4 / 3


def test_another_layer_time_is_refused(write_config: Callable[[], Path]) -> None:
    text = message(write_config(), "engine.layer_time=summed")
    assert "engine.layer_time" in text
    assert "measured" in text and "sum" in text
