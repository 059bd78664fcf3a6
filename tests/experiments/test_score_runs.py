"""Recorded runs beside their simulation: the tool's file, cached prompts, fits, what remains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.beside.recorded import (
    Case,
    Overheads,
    ServerRun,
    cases_of,
    fitted_to,
    read_server_run,
    score_runs,
)
from sarathi_sim.experiments.cli.app import app
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.simulator.op_times.iteration import HostTime
from tests.experiments.test_server_run import SMALL

TOOL: dict[str, Any] = {
    "request_rate": 4.0,
    "input_lens": [100, 200, 300],
    "output_lens": [3, 1, 2],
    "ttfts": [0.05, 0.06, 0.07],
    "itls": [[0.01, 0.03], [], [0.02]],
}
Write = Callable[[str], Path]
CONFIG = f"{SMALL}kv_cache: {{num_blocks: 400}}\n"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "rate_04.json"
    path.write_text(json.dumps(TOOL))
    return path


def test_the_tools_file(recorded: Path) -> None:
    """Arrivals are the gaps that the tool draws, one by one, from the legacy generator."""
    run = read_server_run(recorded).requests
    legacy = np.random.RandomState(0)
    gaps = [legacy.exponential(1 / 4) for _ in range(2)]
    assert run["arrival_s"].tolist() == [0.0, gaps[0], gaps[0] + gaps[1]]
    assert run["latency_s"].tolist() == pytest.approx([0.09, 0.06, 0.09])
    assert run["tpot_s"].dropna().tolist() == pytest.approx([0.02, 0.02])
    recorded.write_text(json.dumps(TOOL | {"request_rate": "inf"}))
    assert read_server_run(recorded).requests["arrival_s"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"itls": [[]]}, "itls: must have 3 entries, as input_lens has"),
        ({"request_rate": 0}, "request_rate"),
        ({"ttfts": [1, 2, "x"]}, r"ttfts.2: "),
        ({"input_lens": []}, "input_lens: "),
    ],
)
def test_a_file_that_is_none(recorded: Path, changed: dict[str, Any], message: str) -> None:
    recorded.write_text(json.dumps(TOOL | changed))
    with pytest.raises(ConfigError, match=message):
        read_server_run(recorded)


def test_prompts_are_cached(recorded: Path, write_config: Write) -> None:
    """All full blocks are found, but for the one with the last token of the prompt."""
    run = read_server_run(recorded)
    experiment = load_experiment(write_config(CONFIG), ["kv_cache.prompts_cached=true"])
    (case,) = cases_of(experiment, [recorded])
    found = case.under(Overheads()).analysis.requests["hit_tokens"]
    assert found.tolist() == [16 * ((p - 1) // 16) for p in run.requests["prompt_tokens"]]
    wrong = ["kv_cache.prompts_cached=true", "kv_cache.prefix_caching=false"]
    experiment = load_experiment(write_config(CONFIG), wrong)
    with pytest.raises(ConfigError, match=r"prompts_cached: .* needs kv_cache.prefix_caching"):
        deploy(experiment.scenarios["server"], experiment.sources["server"])


def test_a_scenario_for_each_file(recorded: Path, write_config: Write) -> None:
    """The first pattern that fits decides; a file that fits none is refused."""
    text = CONFIG + 'scenarios: {cold: {}, warm: {}}\nruns: {cold: "*_01.json", warm: "%s"}\n'
    first = recorded.with_name("rate_01.json")
    first.write_text(recorded.read_text())
    cases = cases_of(load_experiment(write_config(text % "*.json")), [first, recorded])
    assert [case.scenario for case in cases] == ["cold", "warm"]
    with pytest.raises(ConfigError, match=r"rate_04.json: no scenario of .* is for it"):
        cases_of(load_experiment(write_config(text % "*_02.json")), [recorded])
    with pytest.raises(ConfigError, match="runs: value 'hot': one of cold, warm"):
        load_experiment(write_config(text.replace('{cold: "', '{hot: "') % "*"))
    both = cases_of(load_experiment(write_config(text.split("runs")[0])), [recorded])
    assert [case.name for case in both] == ["rate_04, cold", "rate_04, warm"]


TRUTH = Overheads(HostTime(0.002, 0.0001), 0.01)


@pytest.fixture
def measured(recorded: Path, write_config: Write) -> list[Case]:
    """Two runs of a server whose host times are :data:`TRUTH`, at other rates."""
    rng = np.random.default_rng(1)
    cases = []
    for name, rate in (("slow", 2.0), ("fast", "inf")):
        lengths = rng.integers(50, 200, (2, 12)).tolist()
        given = {"input_lens": lengths[0], "output_lens": lengths[1], "request_rate": rate}
        filled = {"ttfts": [1.0] * 12, "itls": [[1.0]] * 12}
        path = recorded.with_name(f"{name}.json")
        path.write_text(json.dumps({**TOOL, **given, **filled}))
        (case,) = cases_of(load_experiment(write_config(CONFIG)), [path])
        table = case.under(TRUTH).requests
        rows = case.run.requests.assign(**{k: table[k] for k in ("ttft_s", "tpot_s", "latency_s")})
        cases.append(replace(case, run=ServerRun(rows)))
    return cases


def test_a_fit_finds_the_host_time(measured: list[Case]) -> None:
    found = fitted_to(measured)
    assert found.host.iteration_s == pytest.approx(TRUTH.host.iteration_s, rel=0.05)
    assert found.host.sequence_s == pytest.approx(TRUTH.host.sequence_s, rel=0.05)
    assert found.frontend_s == pytest.approx(TRUTH.frontend_s, rel=0.05)


def test_what_is_scored(measured: list[Case]) -> None:
    runs = score_runs(measured, silent).content()["runs"]
    slow = runs["slow"]
    assert set(slow) >= {"zero", "fitted", "left_out"} and "configured" not in slow
    assert slow["zero"]["off_pct"]["tpot_s"]["mean"] < -10
    assert slow["zero"]["overheads"] == {
        "iteration_s": 0, "sequence_s": 0, "launch_layer_s": 0, "frontend_s": 0,
    }  # fmt: skip
    for name in ("fitted", "left_out"):  # the other run has the same host times
        assert abs(slow[name]["off_pct"]["tpot_s"]["mean"]) < 2
        assert abs(slow[name]["off_pct"]["ttft_s"]["p99"]) < 5
    remains = slow["remains"]
    parts = ("host", "frontend", "first_token", "later_tokens")
    assert sum(remains[part] for part in parts) == pytest.approx(remains["latency_s"])
    assert sum(remains["parts"].values()) == pytest.approx(remains["host"])
    assert remains["parts"]["host"] > 0
    assert sum(group["requests"] for group in slow["by_batch"]) == 12


def test_requests_that_run_beside(recorded: Path, write_config: Write) -> None:
    """Decoding from 0.05 to 0.09, never, and 0.07 to 0.09 s when all arrive at once."""
    recorded.write_text(json.dumps(TOOL | {"request_rate": "inf"}))
    (case,) = cases_of(load_experiment(write_config(CONFIG)), [recorded])
    beside = case.beside
    assert beside[[0, 2]].tolist() == pytest.approx([1.5, 2.0]) and np.isnan(beside[1])


def test_the_command(recorded: Path, write_config: Write, tmp_path: Path) -> None:
    out, config = tmp_path / "out", str(write_config(CONFIG))
    given = ["score", str(recorded), "--config", config]
    printed = CliRunner().invoke(app, [*given, "--out", str(out)])
    assert printed.exit_code == 0, printed.output
    for text in ("time to first token, p90 (s)", "fitted to these", "What the mean latency lacks"):
        assert text in printed.stdout
    assert (out / "figures" / "rate_04.png").is_file()
    header, *rows = (out / "requests.csv").read_text().splitlines()
    assert len(rows) == 3 and header.startswith("run,request,arrival_s,prompt_tokens,output_tokens")
    as_json = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert list(as_json["runs"]) == ["rate_04"]
    for words, message in (
        (["score", str(recorded)], "a recorded run needs --config"),
        ([*given, "--peer", "x.csv"], "--peer goes with tables"),
        (["score", "x.csv", "--set", "seed=1"], "--set goes with --config"),
    ):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2 and message in refused.output
