"""What moves the capacity, and a run's metrics: closed forms, the command, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import sarathi_sim as sim
from sarathi_sim.experiments.capacity.options import Option
from sarathi_sim.experiments.capacity.sensitivity import factors_of, read_sensitivity
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.report.capacity_charts import tornado_charts
from sarathi_sim.experiments.report.draw import drawn
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import called, summary_of

# One request at a time, all alike, from clients that wait for their answers: N of them wait N times
# the service time, so as many as the limit over the service time keep the SLO.
WITHOUT: dict[str, Any] = {
    "name": "one_server",
    "model": "llama-13b",
    "device": "a6000",
    "workload": {
        "requests": 10,
        "lengths": {"kind": "fixed", "prompt": 200, "decode": 1},
        "arrivals": {"kind": "closed_loop", "clients": 1},
    },
    "cluster": {"max_length": 512},
    "batching": {"max_batch": 1},
    "policy": {"name": "sarathi", "chunk_size": 256},
}
SLO = {"slo": "p50 ttft 700ms", "load": "clients", "requests": 100}
ONE_SERVER = WITHOUT | {"capacity": SLO}


def service_s(**scale: float) -> float:
    """How long a request takes that is alone."""
    changes = {"workload.requests": 1, "engine.op_scale": scale}
    run = sim.run(WITHOUT, changes)["one_server"]
    return float(run.requests["ttft_s"].iloc[0])


def test_the_closed_form_of_one_server(tmp_path: Path) -> None:
    """With all ops the capacity falls as they get slower; with one op, by its share of them."""
    out, asked = tmp_path / "out", {"only": ["all ops", "FFN up-projection"], "replications": 1}
    table = sim.capacity(ONE_SERVER, sensitivity=True, **asked, out=out).table
    elasticity = table.set_index("factor")["elasticity"]
    assert elasticity["all ops"] == pytest.approx(-1, rel=0.02)
    share = service_s(ffn_ln1=2) / service_s() - 1
    assert elasticity["ffn_ln1"] == pytest.approx(-share, rel=0.03)
    summary = summary_of(out)
    base = summary["deployments"][0]["base"]["capacity"]
    assert base == pytest.approx(0.7 / service_s(), rel=0.02)
    before = (out / "summary.json").read_bytes()
    pd.testing.assert_frame_equal(
        sim.capacity(ONE_SERVER, sensitivity=True, **asked, out=out).table, table
    )
    assert (out / "summary.json").read_bytes() == before


@pytest.mark.slow
def test_a_long_limit_does_not_hide_an_overload() -> None:
    """One request at a time is served 1 / service times a second, however long others may wait."""
    poisson = {**ONE_SERVER["workload"], "arrivals": {"kind": "poisson", "rate": 1}}
    slo = {"slo": "p90 ttft 5s", "requests": 100}
    asked = {"only": ["all ops"], "replications": 2}
    one = {**ONE_SERVER, "workload": poisson, "capacity": slo}
    (row,) = sim.capacity(one, sensitivity=True, **asked).table.to_dict("records")
    assert 0.9 < row["low"] * 0.9 * service_s() < 1.06
    assert row["elasticity"] == pytest.approx(-1, rel=0.05)


def test_one_run_repeated_has_no_interval() -> None:
    asked = {"only": ["all ops"], "metrics": ["makespan_s"], "replications": 2}
    (row,) = sim.capacity(WITHOUT, sensitivity=True, **asked).table.to_dict("records")
    assert row["elasticity"] == pytest.approx(1, rel=0.02) and row["interval_low"] is None


def test_a_run_bound_by_its_ops(tmp_path: Path) -> None:
    """All requests at once: a percent of all ops is a percent of the throughput, and each op has
    its share of it, all-reduces that of the links; what one op takes nearly alone moves with it."""
    path, out = tmp_path / "bound.yaml", tmp_path / "out"
    lengths = {"kind": "fixed", "prompt": 200, "decode": 4}
    given = WITHOUT | {"workload": {"requests": 4, "lengths": lengths}}
    given["cluster"] = {"max_length": 512, "tp": 2}
    path.write_text(json.dumps(given))
    words = "--sensitivity --workers 1 --json --replications 1 --metric output_tokens_per_s"
    done = called("capacity", path, "--out", out, *words.split())
    content = json.loads(done.stdout)
    assert content == summary_of(out)
    rows = {row["factor"]: row["elasticity"] for row in content["rows"]}
    ops = [row["elasticity"] for row in content["rows"] if row["kind"] == "op"]
    assert rows["all ops"] == pytest.approx(-1, abs=1e-4)
    assert sum(ops) == pytest.approx(-1, rel=0.01)
    assert rows["link speed"] == pytest.approx(-rows["all_reduce"], rel=0.02)
    assert "burstiness" not in rows
    assert content["warnings"][0].startswith("one replication has no confidence")
    assert " % per +1 %; next: " in done.stderr
    for name in ("sensitivity.csv", "config.yaml", "figures/tornado.svg", "probes/results.parquet"):
        assert (out / name).is_file(), name
    for metric, elasticity in (("output_tokens_per_s", -1), ("latency_s.p37", 1)):
        one = sim.capacity(
            given, {"engine.op_scale": {"ffn_ln1": 1000}}, sensitivity=True,
            metrics=[metric], only=["ffn_ln1"], replications=1,
        )  # fmt: skip
        assert one.table["elasticity"].item() == pytest.approx(elasticity, abs=0.02)
    kept = r"--metric tbt_s\.p37: the runs of a sweep keep p50, p90"
    with pytest.raises(UserError, match=kept):
        read_sensitivity(given, metrics=["tbt_s.p37"])


def test_both_bars_of_a_factor_are_seen_whatever_their_signs() -> None:
    row = {"deployment": "d", "measure": "m", "factor": "prompt lengths", "elasticity": 1.0}
    content = {
        "measures": {"m": "load"},
        "deployments": [{"name": "d", "base": {"m": 1.0}}],
        "by": 0.1,
        "rows": [row | {"low_pct": 2.0, "high_pct": 5.0}],
    }
    (chart,) = tornado_charts(content)
    assert [bar.x.tolist() for bar in chart.series] == [[2.0], [5.0]]
    figure = drawn([chart])
    figure.draw_without_rendering()
    (label,) = figure.axes[0].get_yticklabels()
    assert label.get_window_extent().x0 > 0 and label.get_text() == "prompt lengths"


def test_every_factor_changes_its_own_keys() -> None:
    experiment = load_experiment(
        "gpt3_pp",
        {"workload.requests": 8, "engine.host_iteration_s": 1e-3, "engine.launch_layer_s": 1e-4,
         "workload.arrivals": {"kind": "poisson", "rate": 1}},
    )  # fmt: skip
    deployment = next(iter(deploy_all(experiment).values()))
    option = Option("x", {}, deployment)
    found = {factor.name: factor for factor in factors_of(deployment)}
    kinds = [factor.kind for factor in found.values()]
    assert {"op", "ops", "link", "host", "workload"} == set(kinds)
    scale = found["link speed"].changed(option.scenario, 2.0).engine.op_scale
    assert scale == {"all_reduce": 0.5, "send_recv": 0.5}
    engine = found["host time"].changed(option.scenario, 2.0).engine
    assert (engine.host_iteration_s, engine.launch_layer_s) == (2e-3, 2e-4)
    shift = found["burstiness"].changed(option.scenario, 1.1).workload.shift
    assert (shift.burstiness, shift.prompt) == (1.1, 1.0)
    really = found["prompt lengths"].realised(option, 1.1)
    assert 1.05 < really < 1.1  # the longest ones are cut to cluster.max_length


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--by", "1"], "--by 1: must be more than 0 and less than 1"),
        (["--only", "attn_deocde"], "--only: 'attn_deocde': one of all ops"),
        (["--metric", "speed"], "--metric: value 'speed'"),
        (["--refine", "1"], "--refine: has no effect with --sensitivity"),
        (["--set", "capacity.slo=fast"], "capacity.slo"),
    ],
)
def test_mistakes_are_named(options: list[str], message: str, tmp_path: Path) -> None:
    (path := tmp_path / "asked.yaml").write_text(json.dumps(ONE_SERVER))
    done = called("capacity", path, "--sensitivity", "--out", tmp_path / "out", *options, code=2)
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
