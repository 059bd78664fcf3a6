"""A server's recorded run beside the simulator: read, replayed, compared, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.beside.recorded import (
    read_server_run,
    read_ticks,
    replay_server,
    simulated_ticks,
)
from sarathi_sim.experiments.cli.app import app
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import load_experiment

SMALL = """\
name: server
model: llama-3-8b
device: a100-80g-sxm
workload: {requests: 1, lengths: {kind: fixed, prompt: 1, decode: 1}}
cluster: {max_length: 1024}
policy: {name: vllm, max_num_batched_tokens: 512, max_num_seqs: 16}
"""
CONFIG = f"{SMALL}kv_cache: {{num_blocks: 100}}\n"
Write = Callable[[str], Path]


def line(prompt: int, output: int, queued: float, first: float, last: float) -> str:
    times = {"queued_ts": queued, "first_token_ts": first, "last_token_ts": last}
    return json.dumps({"request_id": "bench", "input_toks": prompt, "output_toks": output, **times})


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Two requests, the later one first in the file."""
    path = tmp_path / "requests.jsonl"
    path.write_text(
        line(200, 1, 1000.5, 1000.75, 1000.75) + "\n" + line(300, 11, 1000.0, 1000.25, 1001.25)
    )
    return path


def test_what_was_measured(measured: Path) -> None:
    run = read_server_run(measured).requests
    assert run["arrival_s"].tolist() == [0.0, 0.5]
    assert run["prompt_tokens"].tolist() == [300, 200]
    assert run["ttft_s"].tolist() == [0.25, 0.25]
    assert run["latency_s"].tolist() == [1.25, 0.25]
    assert run["tpot_s"].tolist()[0] == 0.1 and np.isnan(run["tpot_s"][1]), "one token: none"


def test_a_replay_stands_beside_it(measured: Path, write_config: Write) -> None:
    experiment = load_experiment(write_config(CONFIG))
    found = replay_server(experiment, read_server_run(measured))
    one = found["scenarios"]["server"]
    assert (found["requests"], one["num_blocks"], one["preemptions"]) == (2, 100, 0)
    assert found["measured"]["makespan_s"] == 1.25
    assert found["measured"]["ttft_s"]["mean"] == 0.25
    off = one["off_pct"]["ttft_s"]["mean"]
    assert off == pytest.approx(100 * (one["ttft_s"]["mean"] / 0.25 - 1))
    # The request of 300 tokens alone takes as long as in a run of its own.
    alone = measured.with_name("alone.jsonl")
    alone.write_text(line(300, 11, 5.0, 5.5, 6.0))
    single = replay_server(experiment, read_server_run(alone))["scenarios"]["server"]
    assert single["ttft_s"]["mean"] == pytest.approx(one["ttft_s"]["p99"], rel=0.2)
    with pytest.raises(ConfigError, match=r"cluster.max_length: .* must be at least 311"):
        replay_server(
            load_experiment(write_config(CONFIG), ["cluster.max_length=310"]),
            read_server_run(measured),
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ("{", "line 1: the line: "),
        (line(0, 1, 1.0, 2.0, 3.0), "line 1: input_toks: "),
        (line(1, 1, 1.0, 2.0, 3.0) + "\n" + line(1, 1, 2.0, 1.0, 3.0), "line 2: .*must follow"),
        ('{"input_toks": 1, "output_toks": 1}', "line 1: queued_ts: Field required"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_server_run(path)


def test_ticks_of_a_simulated_run_by_hand() -> None:
    """A prompt for 1 s, then two decodes of 1 s, the last of them alone."""
    iterations = pd.DataFrame(
        {
            "start_s": [0.0, 1.0, 2.0],
            "finish_s": [1.0, 2.0, 3.0],
            "chunks": [1, 0, 0],
            "decodes": [0, 2, 1],
            "prefill_tokens": [50, 0, 0],
            "kv_tokens": [50, 60, 40],
        }
    )
    requests = pd.DataFrame({"arrival_s": [0.0, 0.25], "latency_s": [2.0, 2.75]})
    ticks = simulated_ticks(np.array([0.5, 1.5, 2.5, 3.5]), iterations, requests, 100)
    assert ticks.running.tolist() == [1, 2, 1, 0]
    assert ticks.waiting.tolist() == [1, 0, 0, 0]
    assert ticks.prompt.tolist() == [0, 50, 0, 0]
    assert ticks.generated.tolist() == [0, 0, 2, 1]
    assert ticks.kv_cache_pct.tolist() == [50, 60, 40, 0]
    # From 1.5 to 3.5 s: 1.5 requests for 1 s, then 0.5, and three tokens.
    assert ticks.means()["decode_ms"] == pytest.approx(1e3 * (1.5 + 0.5) / 3)


TICKS = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n"


def test_ticks_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "timeseries.csv"
    path.write_text(TICKS + "1.0,300,10,2,0,5\n2.0,0,40,2,0,6\n3.0,0,40,2,0,6.5\n")
    assert read_ticks(path).means()["decode_ms"] == 50.0
    for text, message in (
        (TICKS + "1.0,1,1,1,1,1\n1.0,1,1,1,1,1\n", "t must grow"),
        (TICKS.replace("running", "ran") + "1,1,1,1,1,1\n", "column running is missing"),
        (TICKS + "1.0,1,1,x,1,1\n2.0,1,1,1,1,1\n", "row 2: running must be a finite number"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_ticks(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_ticks(tmp_path / "nothing.csv")


def test_the_command(measured: Path, write_config: Write, tmp_path: Path) -> None:
    path = tmp_path / "timeseries.csv"
    path.write_text(TICKS + "1.0,300,10,2,0,5\n2.0,0,40,2,0,6\n")
    given = ["replay", str(write_config(CONFIG)), str(measured)]
    printed = CliRunner().invoke(app, [*given, "--ticks", str(path)])
    assert printed.exit_code == 0, printed.output
    assert "time to first token, p90 (s)" in printed.stdout
    assert "requests running, mean" in printed.stdout
    as_json = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert set(as_json) >= {"requests", "measured", "scenarios"}
    assert as_json["answer"].startswith("The mean latency of 2 requests is off by ")
    wrong = CliRunner().invoke(app, [*given[:2], str(path)])
    assert wrong.exit_code == 2 and "line 1: the line: " in wrong.output
