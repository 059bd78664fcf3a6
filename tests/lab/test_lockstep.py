"""`sarathi-sim lab lockstep`: recorded decisions of engines' schedulers beside those of ours."""

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

from sarathi_sim.experiments.lab.engines.lockstep import VERSIONS
from sarathi_sim.policies.sglang import Sglang
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.facts.device import engine_facts, engines
from tests import sglang_recorder, vllm_recorder
from tests.experiments.small_config import called, refused

pytestmark = pytest.mark.lab
ROOT = Path(__file__).parents[2]
LOGS = {e: sorted((ROOT / "tests/data" / e).glob("*.jsonl.gz")) for e in ("vllm", "sglang")}
Events = list[Any]


def lockstep(*arguments: object, code: int = 0) -> str:
    return called("lab", "lockstep", *arguments, code=code).stdout


def read(name: str, engine: str = "vllm") -> Events:
    with gzip.open(ROOT / f"tests/data/{engine}/{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def write(path: Path, lines: Events) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def decisions(lines: Events) -> Events:
    return [event for event in lines[1:] if event[0] == "schedule"]


def test_without_a_version_the_newest_that_was_compared_is_meant() -> None:
    compared = {name: [*versions] for name, versions in VERSIONS.items()}
    assert compared | {"trtllm": []} == {name: one.lockstep for name, one in engines().items()}
    assert (Vllm().version, Sglang().version) == (compared["vllm"][-1], compared["sglang"][-1])
    assert Vllm().ahead == engine_facts("vllm").at("async_scheduling")


def test_the_shipped_logs_are_those_of_the_recorder_and_cover_what_they_should() -> None:
    for engine, recorder in (("vllm", vllm_recorder), ("sglang", sglang_recorder)):
        names = [path.name.removesuffix(".jsonl.gz") for path in LOGS[engine]]
        assert names == sorted(recorder.SHIPPED)  # type: ignore[attr-defined]
        assert sum(path.stat().st_size for path in LOGS[engine]) < 150_000
    preempting = ("few_blocks", "shared_prefixes", "priorities", "pp2", "async_pp2_v2", "watermark")
    for name in (*preempting, "drafts", "drafts_async", "drafts_cached", "drafts_pd"):
        assert any(event[3] for event in decisions(read(name))), f"{name}: nobody is preempted"
    # A prompt with one token left is padded with drafts before it has yielded any.
    for name in ("drafts_cached", "drafts_pd"):
        prompts = {row[0]: row[2] for row in read(name)[0]["requests"]}
        rows = [row for event in decisions(read(name)) for row in event[2]]
        padded = [row for row in rows if row[3] and row[1] == prompts[row[0]] - 1]
        assert padded, f"{name}: no prompt is padded"
    for name in ("pd", "pd_shared_prefixes", "decode_bench", "drafts_pd"):
        made = decisions(read(name))
        assert any(event[3] for event in made), f"{name}: nobody is preempted"
        assert any(event[7] > 3 for event in made) == (name != "decode_bench")
        assert any(computed > 0 == event[7] for event in made for _, computed, *_ in event[2])
    for name in ("pp2", "async_pp2_v2", "pd"):
        assert any(not event[2] for event in decisions(read(name))), f"{name}: no empty batch"
    for name in ("mixed", "overlap_eos", "groups", "lpm", "lof"):
        assert any(event[4] for event in decisions(read(name, "sglang"))), f"{name}: no retraction"
    assert any(event[2] == "mixed" for event in decisions(read("mixed", "sglang")))


@pytest.mark.parametrize("engine", LOGS)
def test_every_decision_is_the_same(engine: str) -> None:
    for name, found in json.loads(lockstep(*LOGS[engine], "--json"))["logs"].items():
        assert found["first_difference"] is None
        assert found["identical"] == found["decisions"] == len(decisions(read(name, engine)))


Change = Callable[[Any], Any]
EVENTS: dict[str, Callable[[Any], Any]] = {
    "preempts": lambda event: event[0] == "schedule" and event[3],
    "many": lambda event: event[0] == "schedule" and len(event[2]) > 1,
    "ends": lambda event: event[0] == "return" and event[2],
    "retracts": lambda event: event[0] == "schedule" and event[4],
}


def more(*path: int, by: float = 1) -> Change:
    """Adds to the number at a path of an event."""

    def change(event: Any) -> None:
        *above, place = path
        for each in above:
            event = event[each]
        event[place] += by

    return change


def becomes(place: int, value: object) -> Change:
    return lambda event: event.__setitem__(place, value)


ALTERATIONS: dict[tuple[str, str], dict[str, tuple[str, Change]]] = {
    ("vllm", "few_blocks"): {
        "a preemption less": ("preempts", lambda event: event[3].pop()),
        "another order": ("many", lambda event: event[2].reverse()),
        "a token more": ("many", more(2, 1, 2)),
        "more computed before": ("many", more(2, 0, 1)),
        "a free block more": ("many", more(4)),
        "one more running": ("many", more(5)),
        "one more waiting": ("many", more(6)),
        "an end less": ("ends", lambda event: event[2].pop()),
    },
    ("vllm", "pd"): {
        "another order": ("many", lambda event: event[2].reverse()),
        "one more holding": ("many", more(7)),
        "a draft": ("many", more(2, 0, 3)),
    },
    ("sglang", "overlap_eos"): {
        "another kind": ("retracts", becomes(2, "mixed")),
        "another order": ("retracts", lambda event: event[3].reverse()),
        "nobody retracted": ("retracts", becomes(4, [])),
        "a free token more": ("retracts", more(5)),
        "one more running": ("retracts", more(6)),
        "one more waiting": ("retracts", more(7)),
        "another ratio": ("retracts", more(8, by=1e-6)),
        "a prompt is cut": ("retracts", becomes(9, 5)),
        "full, or not": ("retracts", lambda event: becomes(10, not event[10])(event)),
    },
}


@pytest.mark.parametrize(
    ("engine", "log", "name"),
    [(*log, name) for log, found in ALTERATIONS.items() for name in found],
)
def test_the_first_difference_is_found(engine: str, log: str, name: str, tmp_path: Path) -> None:
    lines = read(log, engine)
    chosen, change = ALTERATIONS[engine, log][name]
    number = next(i for i, line in enumerate(lines) if i and EVENTS[chosen](line))
    change(lines[number])
    difference_is_at(number, lines, tmp_path)


def test_kv_that_arrives_later_is_found(tmp_path: Path) -> None:
    """The request runs in the decision after its arrival, which is no longer there."""
    lines = read("pd")
    place = next(i for i, line in enumerate(lines) if i and line[0] == "recv")
    ids, lines[place][1] = lines[place][1], []
    made = (i for i, line in enumerate(lines) if i > place and line[0] == "schedule")
    runs = next(i for i in made if any(row[0] in ids for row in lines[i][2]))
    difference_is_at(runs, lines, tmp_path)


def difference_is_at(number: int, lines: Events, tmp_path: Path) -> None:
    event = lines[number]
    output = lockstep(write(tmp_path / "altered.jsonl", lines), "--json", code=1)
    found = json.loads(output)["logs"]["altered"]
    assert found["identical"] == len(decisions(lines[:number]))
    assert found["decisions"] == len(decisions(lines))
    kind = "decision" if event[0] == "schedule" else "return"
    assert found["first_difference"].startswith(f"line {number + 1}, {kind} of step {event[1]}: ")
    theirs = event[2:] if event[0] == "schedule" else event[2]
    assert f"engine {theirs}; ours " in found["first_difference"]


def test_switches_may_be_words(tmp_path: Path) -> None:
    lines = read("pd_shared_prefixes")
    config = lines[0]["config"]
    lines[0]["config"] = config | {name: str(config[name]) for name in ("caching", "chunked")}
    assert lines[0]["config"]["caching"] == "True"
    lockstep(write(tmp_path / "words.jsonl", lines))


def test_text_says_it_for_every_log(tmp_path: Path) -> None:
    """Those of one name by their paths."""
    lines, plain = read("plain"), ROOT / "tests/data/vllm/plain.jsonl.gz"
    next(line for line in lines[1:] if EVENTS["many"](line))[2].reverse()
    output = lockstep(plain, write(tmp_path / "altered.jsonl", lines), code=1)
    count = len(decisions(lines))
    assert "first difference: line " in output
    assert "2 logs, " in output and f" of {2 * count} decisions identical." in output
    assert ["plain", f"{count}", f"{count}"] in [line.split() for line in output.splitlines()]
    other = write(tmp_path / "plain.jsonl", read("plain"))
    logs = json.loads(lockstep(plain, other, "--json"))["logs"]
    assert sorted(logs) == sorted(map(str, (plain, other)))


def altered(of: str = "vllm", event: Any = None, config: Any = None, **header: object) -> bytes:
    """A log with other keys in its header, or with this event alone."""
    lines = read("plain", of)
    lines[0] |= header | ({"config": lines[0]["config"] | config} if config else {})
    lines[1:] = lines[1:] if event is None else [event]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


EMPTY = ["schedule", 0, [], [], 0, 0, 0]
NO_DICTS = ["schedule", 0, [[{}, 0, 1]], [], 0, 0, 0]
HUGE = [0, 0.0, 10**400, 1, 0, -1, 0]
BAD: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "nothing": (b"", "line 1: not the header of a log"),
    "no JSON": (b"{", "line 1: not JSON"),
    "a list": (b"[1]\n", "line 1: not the header of a log"),
    "binary": (b"\xff\xfe\x00", "not a log of decisions"),
    "half a gzip": (gzip.compress(altered())[:900], "not a log of decisions"),
    "half a line": (altered()[:-9], "not JSON"),
    "cut at a line's end": (gzip.compress(altered() + b"\n" * 10**6)[:-40], "it is cut short"),
    "another engine": ({"engine": "x"}, "engine 'x': must be 'vllm' or 'sglang'"),
    "another format": ({"format": 2}, "line 1: not the header of a log"),
    "no depth": ({"depth": None}, "line 1: config: depth: value null: must"),
    "another version": ({"version": "0.34.0"}, "version '0.34.0': must be 0.32"),
    "another SGLang": ({"of": "sglang", "version": "0.5.22"}, "version '0.5.22': must be 0.5.23"),
    "an engine's list": ({"engine": []}, "engine '[]': must be"),
    "no chunk": ({"of": "sglang", "config": {"chunked_prefill_size": 0}}, "must be at least 1 or"),
    "vLLM's decision in SGLang's log": ({"of": "sglang", "event": EMPTY}, "line 2: not an event"),
    "an unknown setting": ({"config": {"num_tokens": 3}}, "config: num_tokens: unknown key"),
    "a setting misspelt": ({"config": {"chunke": True}}, "(did you mean chunked?)"),
    "no switch": ({"config": {"caching": "yes"}}, "value 'yes': must be true or false"),
    "no share": ({"config": {"watermark": 10**400}}, "watermark: value 1000"),
    "short rows": ({"requests": [[0, 0.0]]}, "line 1: requests: row 0: [0, 0.0]"),
    "a giant prompt": ({"requests": [HUGE]}, "line 1: requests: row 0: "),
    "requests by name": ({"requests": {}}, "config must hold keys and values"),
    "a mapping as an id": ({"event": ["add", {"a": 1}]}, "line 2: not an event"),
    "a mapping in a decision": ({"event": NO_DICTS}, "line 2: not an event"),
    "a mode": ({"mode": "push"}, "line 1: engine 'vllm push': must be 'vllm pd' or "),
    "KV of nobody's": ({"event": ["recv", [3]]}, "line 2: not an event"),
    "no event": ({"event": ["sleep", 1]}, "line 2: not an event"),
    "an unknown request": ({"event": ["add", 10**6]}, "replayed: request or step 1000000 is"),
    "a return of nothing": ({"event": ["return", 3, []]}, "line 2"),
}


@pytest.mark.parametrize(("content", "says"), BAD.values(), ids=BAD)
def test_a_bad_log_is_one_line(content: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    assert f"{path}: " in refused("lab", "lockstep", path), "there is no such file yet"
    path.write_bytes(content if isinstance(content, bytes) else altered(**content))
    line = refused("lab", "lockstep", path)
    assert line.startswith(f"error: {path}: ") and says in line


def interpreter(engine: str) -> str | None:
    own = sys.executable if importlib.util.find_spec(engine) else None
    return os.environ.get(f"SARATHI_SIM_{engine.upper()}_PYTHON") or own


@pytest.mark.parametrize("engine", LOGS)
def test_fresh_logs_of_random_settings(engine: str, tmp_path: Path) -> None:
    """The seed may be set, so that every run may see other settings."""
    python = interpreter(engine)
    if python is None:
        pytest.skip(f"no {engine}: name a Python with it in SARATHI_SIM_{engine.upper()}_PYTHON")
    seed = os.environ.get(f"SARATHI_SIM_{engine.upper()}_SEED", "1")
    command = [python, "-m", "tests.recorder", engine, "--random", "50"]
    subprocess.run(
        [*command, "--seed", seed, "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=800
    )
    paths = sorted(tmp_path.glob("*.gz"))
    assert len(paths) == 50
    found = json.loads(lockstep(*paths, "--json"))["logs"]
    assert all(log["identical"] == log["decisions"] > 0 for log in found.values())
