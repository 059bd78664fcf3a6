"""Errors on points that no fit saw."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from typer.testing import CliRunner

from experiments.cli import app
from profiler.paths import data_dir
from simulator.held_out import held_out_errors
from tests.simulator.test_predictor import LAYER_OPS, shipped, simple_bundle


def test_a_straight_line_is_known_between_and_beyond_its_points() -> None:
    """Times in proportion to the tokens: piecewise linear is exact, a forest cannot extrapolate."""
    tokens = np.arange(1, 201) * 16
    linear = pd.DataFrame(
        [(op, m, 3.0 * m) for op in (*LAYER_OPS, "embedding", "lm_head") for m in tokens],
        columns=["op", "num_tokens", "time_us"],
    )
    errors = held_out_errors(dataclasses.replace(simple_bundle(), linear=linear))
    ours = errors[errors["op"] == "others"].set_index("where")
    assert ours["worst"].max() < 1e-6
    assert ours.loc["between", "points"] == 198
    assert ours.loc["edges", "points"] == 24  # 128, 256 ... 3072; one above none is not sampled
    assert ours.loc["beyond", "points"] == 150
    assert ours.loc["beyond", "forest_median"] > 40


def test_a_step_that_was_left_out_shows() -> None:
    """One point twice as slow as its neighbours: held out it is off by half, and nothing else is
    off by more, however well a fit to all points would pass through it."""
    tokens = np.arange(1, 101)
    time = np.where(tokens == 50, 20.0, 10.0)
    linear = pd.concat(
        pd.DataFrame({"op": op, "num_tokens": tokens, "time_us": time})
        for op in (*LAYER_OPS, "embedding", "lm_head")
    )
    errors = held_out_errors(dataclasses.replace(simple_bundle(), linear=linear))
    row = errors[(errors["op"] == "postproj") & (errors["where"] == "between")].iloc[0]
    assert 50 <= row["worst"] <= 100
    assert row["median"] == 0


def test_shipped_bundles_and_the_command() -> None:
    bundle, _ = shipped("a100-80g-sxm", "gpt3-175b", 8)
    errors = held_out_errors(bundle).set_index(["op", "where"])
    for op in LAYER_OPS:
        assert errors.loc[(op, "between"), "median"] < 3
    done = CliRunner().invoke(
        app, ["fit", str(data_dir() / "profiles" / "a6000" / "llama-13b" / "tp1")]
    )
    assert done.exit_code == 0, done.output
    assert "attn_decode" in done.stdout
