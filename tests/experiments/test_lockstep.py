"""`sarathi-sim lockstep`: recorded decisions of vLLM's scheduler beside those of ours."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import app
from tests.vllm_recorder import SHIPPED

ROOT = Path(__file__).parents[2]
LOGS = sorted((ROOT / "tests/data/vllm").glob("*.jsonl.gz"))
Events = list[Any]


def lockstep(*arguments: object) -> tuple[int, str]:
    """Exit code and what was printed."""
    result = CliRunner().invoke(app, ["lockstep", *map(str, arguments)])
    return result.exit_code, result.output


def read(name: str) -> Events:
    with gzip.open(ROOT / f"tests/data/vllm/{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def write(path: Path, lines: Events) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def decisions(lines: Events) -> Events:
    return [event for event in lines[1:] if event[0] == "schedule"]


def test_the_shipped_logs_are_those_of_the_recorder_and_cover_what_they_should() -> None:
    logs = {path.name.removesuffix(".jsonl.gz"): path for path in LOGS}
    assert sorted(logs) == sorted(SHIPPED)
    assert sum(path.stat().st_size for path in LOGS) < 150_000
    for name in ("few_blocks", "shared_prefixes", "priorities", "pp2", "async_pp2_v2", "watermark"):
        assert any(event[3] for event in decisions(read(name))), f"{name}: nobody is preempted"
    for name in ("pp2", "async_pp2_v2"):
        assert any(not event[2] for event in decisions(read(name))), f"{name}: no empty batch"


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.split(".")[0])
def test_every_decision_is_the_same(path: Path) -> None:
    code, output = lockstep(path, "--json")
    (found,) = json.loads(output)["logs"].values()
    assert code == 0
    assert found["first_difference"] is None
    assert found["identical"] == found["decisions"] == len(decisions(read(path.name.split(".")[0])))


def a_preemption(events: Events) -> Any:
    return next(e for e in events if e[0] == "schedule" and e[3])


def a_batch(events: Events) -> Any:
    return next(e for e in events if e[0] == "schedule" and len(e[2]) > 1)


def drop_preemption(events: Events) -> Any:
    event = a_preemption(events)
    event[3].pop()
    return event


def swap_order(events: Events) -> Any:
    event = a_batch(events)
    event[2].reverse()
    return event


def one_token_more(events: Events) -> Any:
    event = a_batch(events)
    event[2][1][2] += 1
    return event


def computed_before(events: Events) -> Any:
    event = a_batch(events)
    event[2][0][1] += 1
    return event


def count(place: int) -> Callable[[Events], Any]:
    def alter(events: Events) -> Any:
        event = [e for e in events if e[0] == "schedule"][30]
        event[place] += 1
        return event

    return alter


def somebody_ends_later(events: Events) -> Any:
    event = next(e for e in events if e[0] == "return" and e[2])
    event[2].pop()
    return event


ALTERATIONS = {
    "a preemption less": drop_preemption,
    "another order": swap_order,
    "a token more": one_token_more,
    "more computed before": computed_before,
    "a free block more": count(4),
    "one more running": count(5),
    "one more waiting": count(6),
    "an end less": somebody_ends_later,
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
def test_the_first_difference_is_found(alter: Callable[[Events], Any], tmp_path: Path) -> None:
    lines = read("few_blocks")
    event = alter(lines[1:])
    number = next(i for i, line in enumerate(lines) if line is event)
    path = write(tmp_path / "altered.jsonl", lines)
    code, output = lockstep(path, "--json")
    found = json.loads(output)["logs"]["altered"]
    assert code == 1
    assert found["identical"] == len(decisions(lines[:number]))
    assert found["decisions"] == len(decisions(lines))
    kind = "decision" if event[0] == "schedule" else "return"
    assert found["first_difference"].startswith(f"line {number + 1}, {kind} of step {event[1]}: ")
    theirs = event[2:] if event[0] == "schedule" else event[2]
    assert f"engine {theirs}; ours " in found["first_difference"]


def test_text_says_it_for_every_log(tmp_path: Path) -> None:
    lines = read("plain")
    swap_order(lines[1:])
    altered = write(tmp_path / "altered.jsonl", lines)
    code, output = lockstep(ROOT / "tests/data/vllm/plain.jsonl.gz", altered)
    assert code == 1
    assert "first difference: line " in output
    assert "2 logs, " in output
    whole = f"{len(decisions(lines))} of     {len(decisions(lines))} identical"
    assert whole in output


def test_logs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        paths.append(write(tmp_path / folder / "log.jsonl", read("plain")))
    _, output = lockstep(*paths, "--json")
    assert sorted(json.loads(output)["logs"]) == sorted(map(str, paths))


def another_header(**changes: object) -> bytes:
    lines = read("plain")
    lines[0] |= changes
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def another_config(**changes: object) -> bytes:
    return another_header(config=read("plain")[0]["config"] | changes)


def with_event(event: object) -> bytes:
    lines = read("plain")
    return "".join(json.dumps(line) + "\n" for line in [lines[0], event]).encode()


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "line 1: not the header of a log"),
    "no JSON": (lambda: b"{", "line 1: not JSON"),
    "a list": (lambda: b"[1]\n", "line 1: not the header of a log"),
    "binary": (lambda: b"\xff\xfe\x00", "not a log of decisions"),
    "half a gzip": (lambda: gzip.compress(another_header())[:900], "not a log of decisions"),
    "half a line": (lambda: another_header()[:-9], "not JSON"),
    "another engine": (lambda: another_header(engine="x"), "engine 'x': must be 'vllm'"),
    "cut at the end of a line": (
        lambda: gzip.compress(another_header() + b"\n" * 10**6)[:-40],
        "not a log of decisions: it is cut short",
    ),
    "another format": (lambda: another_header(format=2), "line 1: not the header of a log"),
    "no depth": (lambda: another_header(depth=None), "line 1: depth null: must be"),
    "depth 0": (lambda: another_header(depth=0), "line 1: depth 0: must be"),
    "no settings": (lambda: another_header(config={}), "line 1: block_size null: must be"),
    "no blocks": (lambda: another_config(num_blocks=0), "line 1: num_blocks 0: must be"),
    "blocks of text": (lambda: another_config(num_blocks="many"), "num_blocks 'many': must"),
    "no such order": (lambda: another_config(policy="lifo"), "line 1: policy 'lifo': must be fcfs"),
    "another version": (lambda: another_header(version="0.33.0"), "version '0.33.0': must be 0.32"),
    "no version": (lambda: another_header(version=None), "version null: must be 0.32"),
    "an unknown setting": (
        lambda: another_config(num_speculative_tokens=3),
        "config.num_speculative_tokens: a setting that is not modelled",
    ),
    "a setting misspelt": (lambda: another_config(chunke=True), "(did you mean chunked?)"),
    "no switch": (lambda: another_config(caching="yes"), "caching 'yes': must be true or false"),
    "no share": (lambda: another_config(watermark=10**400), "watermark 1000"),
    "short rows": (
        lambda: another_header(requests=[[0, 0.0]]),
        "line 1: requests: row 0: [0, 0.0]",
    ),
    "a row of text": (lambda: another_header(requests=["text of 8"]), "line 1: requests: row 0: "),
    "a giant prompt": (
        lambda: another_header(requests=[[0, 0.0, 10**400, 1, 0, -1, 0]]),
        "line 1: requests: row 0: ",
    ),
    "a mapping as an id": (lambda: with_event(["add", {"a": 1}]), "line 2: not an event"),
    "a mapping in a decision": (
        lambda: with_event(["schedule", 0, [[{}, 0, 1]], [], 0, 0, 0]),
        "line 2: not an event",
    ),
    "no event": (lambda: with_event(["sleep", 1]), "line 2: not an event"),
    "an unknown request": (
        lambda: with_event(["add", 10**6]),
        "line 2: cannot be replayed: request or step 1000000 is",
    ),
    "a return of nothing": (lambda: with_event(["return", 3, []]), "line 2"),
    "a decision of a word": (lambda: with_event(["schedule", [], [], [], 0, 0, 0]), "line 2"),
}


def refused(path: Path) -> str:
    """The one line in which the command ends."""
    done = CliRunner().invoke(app, ["lockstep", str(path)])
    assert done.exit_code == 2, done.output
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(("content", "says"), BAD.values(), ids=BAD)
def test_a_bad_log_is_one_line(content: Callable[[], bytes], says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content())
    line = refused(path)
    assert line.startswith(f"error: {path}: ") and says in line


def test_no_such_log_is_one_line(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none.gz'}: " in refused(tmp_path / "none.gz")


INTERPRETER = os.environ.get("SARATHI_SIM_VLLM_PYTHON") or (
    sys.executable if importlib.util.find_spec("vllm") else None
)


@pytest.mark.skipif(
    INTERPRETER is None,
    reason="no vLLM: install the extra `vllm`, or name in SARATHI_SIM_VLLM_PYTHON a Python with it",
)
def test_fresh_logs_of_random_settings(tmp_path: Path) -> None:
    """The seed may be set, so that every run may see other settings."""
    assert INTERPRETER is not None
    seed = os.environ.get("SARATHI_SIM_VLLM_SEED", "1")
    command = [INTERPRETER, "-m", "tests.vllm_recorder", "--random", "50"]
    subprocess.run(
        [*command, "--seed", seed, "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=800
    )
    paths = sorted(tmp_path.glob("*.gz"))
    assert len(paths) == 50
    code, output = lockstep(*paths, "--json")
    found = json.loads(output)["logs"]
    wrong = {name: log["first_difference"] for name, log in found.items()}
    assert not {name: text for name, text in wrong.items() if text is not None}
    assert code == 0
    assert all(log["identical"] == log["decisions"] > 0 for log in found.values())
