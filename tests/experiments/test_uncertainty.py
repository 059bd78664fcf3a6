"""Bands and warnings of a run, as its user sees them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import app
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import simulate_all
from sarathi_sim.profiler.bundle.schema import bundle_path, load_bundle, write_bundle
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.simulator.op_times.iteration import WholeLayer
from tests.sampled import profile_folder
from tests.simulator.test_interaction import layers

Write = Callable[..., Path]
DATASETS = Path(
    os.environ.get("SARATHI_SIM_DATASETS", data_dir().resolve().parents[1] / "shared" / "datasets")
)


def test_bands_hold_the_numbers_and_ratios_are_surer_than_runs(write_config: Write) -> None:
    outcome = simulate_all(load_experiment(write_config()))
    summary = outcome.summary()
    widths = []
    for scenario in summary["scenarios"].values():
        low, high = scenario["makespan_s_band"]
        assert low < scenario["makespan_s"] < high
        widths.append(high / low)
        assert scenario["outside_profile"] == []
        for metric in ("requests_per_s", "tokens_per_s", "mfu"):
            slow, fast = scenario[f"{metric}_band"]
            assert slow / scenario[metric] == pytest.approx(scenario["makespan_s"] / high, rel=5e-3)
            assert fast > scenario[metric]
    low, high = summary["ratio_bands"]["speedup"]
    assert low < summary["ratios"]["speedup"] < high
    # Errors that both have in common cancel.
    assert high / low < widths[0] * widths[1]
    assert min(widths) > 1.005 and max(widths) < 1.3


def test_a_run_over_itself_is_sure(write_config: Write) -> None:
    text = write_config().read_text().replace(
        "sarathi: {policy: {name: sarathi, chunk_size: 256}}", "sarathi: {}"
    )  # fmt: skip
    outcome = simulate_all(load_experiment(write_config(text)))
    assert outcome.ratio_bands == {"speedup": [1.0, 1.0]}


def test_what_does_not_follow_from_the_makespan_has_no_band(write_config: Write) -> None:
    changed = ["compare.speedup.metric=ttft_s.p50"]
    outcome = simulate_all(load_experiment(write_config(), changed))
    assert outcome.ratio_bands == {}


@pytest.mark.slow
def test_whole_layers_that_scatter_make_a_run_less_sure(
    write_config: Write, tmp_path: Path
) -> None:
    shard = ("a100-80g-sxm", "gpt3-175b", 8)
    shipped = load_bundle(profile_folder(*shard))
    widths = []
    for noise in (0.0, 0.2):
        mixed = layers(shipped, WholeLayer(1.1), noise)
        root = tmp_path / str(noise)
        write_bundle(replace(shipped, mixed=mixed), bundle_path(root, *shard))
        outcome = simulate_all(load_experiment(write_config(), [f"profiles={root}"]))
        scenario = outcome.summary()["scenarios"]["sarathi"]
        widths.append(np.diff(scenario["makespan_s_band"])[0] / scenario["makespan_s"])
        alone = simulate_all(
            load_experiment(write_config(), [f"profiles={root}", "engine.layer_time=sum"])
        ).summary()["scenarios"]["sarathi"]
        ops = np.diff(alone["makespan_s_band"])[0] / alone["makespan_s"]
        # All-reduces lie outside of whole layers: of longer layers their errors are a smaller part.
        assert widths[-1] > 0.9 * ops
    assert widths[1] > 1.2 * widths[0]


@pytest.mark.usefixtures("few_trees")
@pytest.mark.skipif(not DATASETS.is_dir(), reason="needs the public measurements")
def test_imported_data_give_a_band_and_warnings(tmp_path: Path) -> None:
    """The commands of data/README.md: LLaMA-2-70B on Vidur's A100 data, prompts up to 4,000."""
    profiles, config = tmp_path / "profiles", tmp_path / "l70.yaml"
    imported = CliRunner().invoke(
        app,
        ["import", "vidur", str(DATASETS / "vidur"), "--model", "llama-2-70b", "--tp", "4",
         "--out", str(profiles)],
    )  # fmt: skip
    assert imported.exit_code == 0, imported.output
    config.write_text(
        "name: l70\nmodel: llama-2-70b\ndevice: a100-80g-sxm\n"
        f"profiles: {profiles}\n"
        "workload:\n  requests: 40\n  lengths: {kind: uniform, min: 3000, max: 4096}\n"
        "  pd_ratio: 10\n  arrivals: {kind: at_once}\n"
        "cluster: {tp: 4, max_length: 4096}\n"
        "scenarios:\n  whole: {policy: {name: orca, case: unconstrained}}\n"
        "  chunks: {policy: {name: sarathi, chunk_size: 256}}\n"
    )
    out = tmp_path / "run"
    ran = CliRunner().invoke(app, ["run", str(config), "--no-figures", "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert "makespan, 90 % band" in ran.stdout
    # The MLP profiles end at 4,096 tokens: several prompts of one batch make more rows.
    assert "warning: whole: a100-80g-sxm/llama-2-70b/tp4: ffn_ln1" in ran.stdout
    whole = json.loads((out / "summary.json").read_text())["scenarios"]["whole"]
    (ffn,) = (o for o in whole["outside_profile"] if o["op"] == "ffn_ln1")
    assert ffn["beyond"] > 1.5 and 0 < ffn["iterations"] <= 1
    assert f"size {ffn['profile'][0][0]}" in ran.stdout
    low, high = whole["makespan_s_band"]
    assert low < whole["makespan_s"] < high
