"""Answers of ``recommend`` while they grow: as an iterator, as lines of JSON, after a time limit
and after an interruption."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sarathi_sim as sim
from sarathi_sim.experiments.capacity.answer import load_prices
from sarathi_sim.experiments.capacity.bounds import most_requests_per_s
from sarathi_sim.experiments.capacity.options import deployable
from sarathi_sim.experiments.capacity.screening import Screening, Worth
from sarathi_sim.experiments.capacity.slo import parse_slo
from sarathi_sim.experiments.options import seconds_of
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import called
from tests.experiments.small_laboratory import question
from tests.patience import PATIENCE_S

ASKED: dict[str, Any] = {
    "model": "llama-13b",
    "device": "a6000",
    "slo": "p90 ttft 2s, mean tbt 150ms",
    "gpus": 2,
    "workload": "200:10",
    "budget": [128],
    "seqs": [6, 8],
    "changes": {"tolerance": 0.5},
    "workers": 1,
}
QUESTION: dict[str, Any] = {
    **{key: ASKED[key] for key in ("model", "device", "slo", "workload")},
    **{"budget": "128", "seqs": "6", "dtype": "bf16"},
}
WORDS = (
    *("recommend", "--model", "llama-13b", "--device", "a6000", "--gpus", "2", "--seqs", "6,8"),
    *("--slo", ASKED["slo"], "--workload", "200:10", "--budget", "128", "--workers", "1"),
    *("--set", "tolerance=0.5"),
)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[sim.Result]]:
    """All answers to the question, and the folder of the last."""
    folder = tmp_path_factory.mktemp("grown") / "a"
    return folder, [*sim.partial_answers(**ASKED, out=folder)]


def test_each_answer_holds_the_last_one_until_that_is_settled(
    grown: tuple[Path, list[sim.Result]],
) -> None:
    """The first after one race; then all rows are those of deployments that have run, the best
    first; the last is what ``recommend`` returns, and what its folder holds."""
    folder, (*partial, last) = grown
    assert last["open"] is None and last["winner"] == last["deployments"][0]["name"]
    assert json.loads((folder / "summary.json").read_text())["winner"] == last["winner"]
    first, settled = partial[0], last["deployments"][0]["capacity"]
    assert len(first["screened"]) == 1 and first["open"]["not_run"]
    for one in partial:
        assert one["deployments"] == [] and one["winner"] is None and not one.written
        assert one["open"]["between"][0] <= settled <= one["open"]["between"][1]
        values = [row["about"] / row["per_hour"] for row in one["screened"]]
        assert values == sorted(values, reverse=True)
        assert one["command"].count("vllm serve") == 1
    counts = [one["open"]["not_run"] for one in partial]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0
    assert any(one["open"]["not_settled"] for one in partial)
    assert all(one["open"]["left_s"] is not None for one in partial[1:])
    assert sim.recommend(**ASKED, out=folder)["deployments"] == last["deployments"]


def test_lines_of_json_end_with_the_whole_answer(grown: tuple[Path, list[sim.Result]]) -> None:
    folder, _ = grown
    done = called(*WORDS, "--progress", "json", "--out", folder)
    *partial, last = map(json.loads, done.stdout.splitlines())
    assert partial and all(one["answer"].startswith("best so far: ") for one in partial)
    assert all(one["open"]["left_s"] is None for one in partial)  # all runs were there
    assert last == json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_time_limit_keeps_what_is_known_and_the_next_call_goes_on(
    grown: tuple[Path, list[sim.Result]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps beyond the limit after the second partial answer."""
    whole, now = grown[1][-1], [0.0]
    monkeypatch.setattr("sarathi_sim.experiments.library.time.monotonic", lambda: now[0])
    answers = sim.partial_answers(**ASKED, out=tmp_path / "b", time_limit="2min")
    known = next(answers)
    now[0] = 119.0
    for one in answers:
        known, now[0] = one, now[0] + 2
    assert known["open"] and known["winner"] is None and known.written == [tmp_path / "b"]
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["open"] is not None
    assert sim.report([tmp_path / "b"]).written
    assert (tmp_path / "b" / "launch.sh").is_file() and not (tmp_path / "b" / "figures").exists()
    assert known.section is not None and known.section.answer.startswith("best so far: ")
    kept = {path.name for path in (tmp_path / "b" / "probes" / "runs").iterdir()}
    assert kept
    again = sim.recommend(**ASKED, out=tmp_path / "b")
    assert again["deployments"] == whole["deployments"]
    assert kept < {path.name for path in (tmp_path / "b" / "probes" / "runs").iterdir()}
    monkeypatch.undo()
    with pytest.raises(UserError, match="--time-limit: there is no answer after 1e-05 s"):
        sim.recommend(**ASKED, out=tmp_path / "c", time_limit="0.00001s")


def test_an_answer_that_is_left_is_kept(tmp_path: Path) -> None:
    answers = sim.partial_answers(**ASKED, out=tmp_path / "a")
    known = next(answers)
    del answers
    there = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert there["open"]["between"] == [*known["open"]["between"]]


@pytest.mark.slow
def test_ctrl_c_prints_and_keeps_what_is_known(tmp_path: Path) -> None:
    """After the first line; then the same command goes on, and another question in the same folder
    is answered as in a folder of its own."""
    command = [sys.executable, "-m", "sarathi_sim", *WORDS, "--out", str(tmp_path / "a")]
    with subprocess.Popen(
        [*command, "--progress", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert json.loads(child.stdout.readline())["open"]
        child.send_signal(signal.SIGINT)
        told = child.stderr.read()
        assert child.wait(PATIENCE_S) == 130
    assert told.splitlines() == [
        "stopped: finished work is kept; the same command continues it",
        "interrupted",
    ]
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["open"]
    again = sim.recommend(**ASKED, out=tmp_path / "a")
    assert again["open"] is None
    other = ASKED | {"slo": "p90 ttft 1s, mean tbt 150ms"}
    alone = sim.recommend(**other, out=tmp_path / "b")
    assert sim.recommend(**other, out=tmp_path / "a")["deployments"] == alone["deployments"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, math.inf), (2.5, 2.5), ("10s", 10), ("2min", 120), ("2 m", 120), ("1h", 3600)],
)
def test_a_time_is_read(given: float | str | None, seconds: float) -> None:
    assert seconds_of("--time-limit", given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "0s", "-1", "10 days", "1e9h", "nan"])
def test_what_is_no_time(given: str) -> None:
    with pytest.raises(UserError, match="expected a time such as 10s, 2min or 1h"):
        seconds_of("--time-limit", given)


@pytest.mark.slow
def test_a_settled_answer_stays_when_the_same_question_is_left(tmp_path: Path) -> None:
    few = ASKED | {"seqs": [8], "gpus": 1}
    settled = sim.recommend(**few, out=tmp_path / "a")
    answers = sim.partial_answers(**few, out=tmp_path / "a")
    assert next(answers)["open"]
    del answers
    there = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert there["winner"] == settled["winner"] and (tmp_path / "a" / "winner.yaml").is_file()


@pytest.mark.slow
def test_no_more_gpus_are_proposed_than_there_are() -> None:
    """At a rate that takes nearly all 64 of them by the bounds, and more by the first run."""
    given = {key: value for key, value in ASKED.items() if key not in ("gpus", "seqs")}
    option = deployable(question(**{**QUESTION, "gpus": 1}))[0][0]
    rate = 0.985 * 64 * most_requests_per_s(option, parse_slo(ASKED["slo"]))
    with pytest.raises(UserError, match=r"requests/s need at least \d+ GPUs"):
        sim.recommend(**given, seqs=[6], rate=rate)


def test_between_counts_each_device_at_its_own_price() -> None:
    """On 8 GPUs the best so far, of an H100, sustains 80 requests/s at least, those of an A6000 at
    most 0.7 x 8 x 8 = 44.8: better for its price, so the settled one may be either."""
    asked = question(**{**QUESTION, "gpus": 8, "device": "a6000,h100-80g-sxm"})
    options = deployable(asked)[0]
    cheap, dear = (next(o for o in options if o.name.startswith(d)) for d in asked.devices)
    screening: Any = Screening(SimpleNamespace(), Worth(asked, load_prices(None)))  # type: ignore[arg-type]
    screening.waiting, screening.bounded = [cheap], {cheap: 8.0, dear: 20.0}
    prices = [screening.worth.prices.of(name) for name in asked.devices]
    best = replace(screening.worth.of(dear, 10.0), known=(10.0, 11.0))
    still = screening.open([best])
    assert still.not_run == 1 and still.servers == (8, 8)
    assert still.between == pytest.approx((80 * prices[0] / prices[1], 88))
