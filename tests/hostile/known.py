"""Inputs that once ended in a traceback, a hang, or the loss of a user's file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.hostile.box import Command
from tests.hostile.doors import _REPORTED, BUNDLE, _sign
from tests.hostile.template import EXPERIMENT, HF_CONFIG, SWEEP
from tests.hostile.values import laughs

Known = Callable[[Path], Command]
_TAGS = ("!!bool foo", "!!timestamp foo", "!!map [a, b]", "!!set [a]", "!!int ''")
_CHECK = Command(["check", "exp.yaml"])
_RUN = ["run", "exp.yaml", "--quiet", "--no-figures", "--out"]
_SWEEP = ["sweep", "sweep.yaml", "--workers", "1", "--quiet", "--out"]


def _set(*assignments: str, config: str = "exp.yaml", command: str = "check") -> Known:
    more = [word for text in assignments for word in ("--set", text)]
    return lambda box: Command([command, config, *more])


def _file(name: str, content: str, command: Command = _CHECK) -> Known:
    def prepare(box: Path) -> Command:
        (box / name).write_text(content, encoding="utf-8")
        return command

    return prepare


def _edited(name: str, old: str, new: str, command: Command = _CHECK) -> Known:
    def prepare(box: Path) -> Command:
        text = (box / name).read_text(encoding="utf-8")
        assert old in text, (name, old)
        (box / name).write_text(text.replace(old, new), encoding="utf-8")
        return command

    return prepare


def _config(**keys: object) -> Known:
    check = Command(["check", "exp.yaml", "--set", "model=hf/tiny"])
    return _file("hf/tiny/config.json", json.dumps({**HF_CONFIG, **keys}), check)


def _added(name: str, command: Command) -> Known:
    def prepare(box: Path) -> Command:
        path = box / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("the user's\n")
        return command

    return prepare


def _any_runs(box: Path) -> Command:
    """Somebody's folder that happens to have ``runs/`` in it."""
    for name in (
        "work/runs/.git/HEAD",
        "work/failed/why.txt",
        "work/summary.json",
        "work/results.parquet",
    ):
        (box / name).parent.mkdir(parents=True, exist_ok=True)
        (box / name).write_text("the user's\n")
    return Command([*_SWEEP, "work", "--resume"], "work")


def _in_runs(box: Path) -> Command:
    for name in ("swept/runs/.git/HEAD", "swept/failed/why.txt"):
        (box / name).parent.mkdir(parents=True, exist_ok=True)
        (box / name).write_text("the user's\n")
    return Command([*_SWEEP, "swept", "--resume"], "swept")


def _absurd_time(box: Path) -> Command:
    path = box / BUNDLE / "linear.csv"
    lines = path.read_text().splitlines()
    lines[5] = lines[5].rpartition(",")[0] + ",1e308"
    path.write_text("\n".join(lines) + "\n")
    _sign(box / BUNDLE)
    return Command([*_RUN, "new"], "new")


def _zeros(box: Path) -> Command:
    lengths = "workload.lengths={kind: trace, path: /dev/zero}"
    return Command(["check", "exp.yaml", "--set", lengths, "--set", "workload.pd_ratio=null"])


def _replicas(box: Path) -> Command:
    assert os.path.isdir(box)  # noqa: PTH112
    return Command([*_RUN, "new", "--set", "cluster.replicas=4096"], "new")


def _giant(name: str) -> Known:
    """A result all of whose numbers have 400 digits more."""

    def prepare(box: Path) -> Command:
        path = box / name / "summary.json"
        path.write_text(re.sub(r"(: -?\d+)\b", rf"\g<1>{'0' * 400}", path.read_text()))
        return Command(["report", name, "--quiet", "--out", "page.html"], "page.html")

    return prepare


def _axis(text: str, *more: str) -> Known:
    return _set(
        "sweep.grid={engine.jitter: " + text + "}", *more, config="sweep.yaml", command="plan"
    )


_DEEP = "[" * 100_000 + "]" * 100_000
_DECLARED = ("workload.declared=exact", "batching.kv_reservation=declared")

KNOWN: dict[str, Known] = {
    **{f"seed: {tag}": _edited("exp.yaml", "seed: 7", f"seed: {tag}") for tag in _TAGS},
    **{f"key {tag}": _edited("exp.yaml", "seed: 7", f"? {tag}\n: 7") for tag in _TAGS},
    **{f"root {tag}": _file("exp.yaml", tag + "\n") for tag in _TAGS},
    **{f"--set seed={tag}": _set(f"seed={tag}") for tag in _TAGS},
    **{f"device {tag}": _edited("device.yaml", "num_sms: 64", f"num_sms: {tag}") for tag in _TAGS},
    **{
        f"model {tag}": _edited("model.yaml", "num_layers: 4", f"num_layers: {tag}")
        for tag in _TAGS
    },
    **{f"meta {tag}": _edited(f"{BUNDLE}/meta.yaml", "tile: 128", f"tile: {tag}") for tag in _TAGS},
    "aliases without end in a device": _edited(
        "device.yaml", "notes: made up", f"notes: {laughs(9)}"
    ),
    "aliases without end in a model": _edited("model.yaml", "name: tiny", f"name: {laughs(9)}"),
    "rate: 1:30": _edited("exp.yaml", "rate: 50.0", "rate: 1:30"),
    "a duplicate key": _file("exp.yaml", EXPERIMENT + "seed: 8\n"),
    "scenarios: 5 and --set": _edited(
        "exp.yaml",
        EXPERIMENT[EXPERIMENT.index("scenarios:") :],
        "scenarios: 5\n",
        Command(["check", "exp.yaml", "--set", "seed=3"]),
    ),
    "cv 1e-300": _set("workload.arrivals.cv=1.0e-300"),
    "cv 1000": _set("workload.arrivals.cv=1000"),
    "profiles: ~nosuch/x": _set("profiles=~nosuch/x"),
    "a trace in ~nosuch": _set(
        "workload.lengths={kind: trace, path: ~nosuch/x}", "workload.pd_ratio=null"
    ),
    "a NUL in a path": _set('profiles="a\\0b"'),
    "a NUL in a model": _set('model="a\\0b"'),
    "a NUL in a device": _set('device="a\\0b.yaml"'),
    "--out on a loop of links": lambda box: Command([*_RUN, "loop"], "loop"),
    "--out below a loop of links": lambda box: Command([*_RUN, "loop/x"], "loop/x"),
    "--out in 2,000 folders": lambda box: Command([*_RUN, "a/" * 2000 + "b"], "a"),
    "step 1e-320": _axis("{from: 1, to: 2, step: 1.0e-320}"),
    "to 1e308, step": _axis("{from: 0, to: 1.0e+308, step: 1}"),
    "to 1e308, num": _axis("{from: 0, to: 1.0e+308, num: 5}"),
    "from 5 to 5": _axis("{from: 0.5, to: 0.5, num: 3}"),
    "a sample of 10^21 points": _set(
        "sweep.grid={"
        + ", ".join(
            f"{key}: {{from: 0.001, to: 0.9, num: 1000}}"
            for key in (
                "engine.jitter",
                "engine.turnaround_s",
                "cluster.usable_memory",
                "workload.pd_ratio",
                "workload.arrivals.rate",
                "workload.arrivals.cv",
                "workload.lengths.theta",
            )
        )
        + "}",
        "sweep.sample={points: 3}",
        config="sweep.yaml",
        command="plan",
    ),
    "JSON 100,000 deep": _file(
        "hf/tiny/config.json", _DEEP, Command(["check", "exp.yaml", "--set", "model=hf/tiny"])
    ),
    "vocab_size 10^400": _config(vocab_size=10**400),
    "hidden_size 10^12": _config(hidden_size=10**12),
    "num_local_experts": _config(num_local_experts=8),
    "kv_lora_rank": _config(kv_lora_rank=512),
    "mlp_bias": _config(mlp_bias=True),
    "quantization_config": _config(quantization_config={"bits": 4}),
    "hidden_act": _config(hidden_act="relu"),
    "layer_types": _config(layer_types=["sliding_attention"] * 4),
    "sliding_window": _config(sliding_window=16),
    "~ as CONFIG": lambda box: Command(["check", "~/exp.yaml"]),
    "~nosuch as CONFIG": lambda box: Command(["check", "~nosuch/exp.yaml"]),
    "a bundle's time of 1e308": _absurd_time,
    "chunk_size 16777216": _set(
        "policy={name: sarathi, chunk_size: 16777216}", "scenarios={}", command="run"
    ),
    "max_batch 10000000": _set("batching.max_batch=10000000", *_DECLARED, command="run"),
    "a trace of /dev/zero": _zeros,
    "4,096 replicas": _replicas,
    "a folder with runs/ of the user's": _any_runs,
    "files of the user's in a sweep": _in_runs,
    "a notebook in a result": _added(
        "result/orca/analysis.ipynb", Command([*_RUN, "result"], "result")
    ),
    "a notebook in a result's figures": _added(
        "result/figures/x.ipynb", Command([*_RUN, "result"], "result")
    ),
    "a note in figures": _added(
        "drawn/notes.txt",
        Command(["compare", "result/orca", "result/sarathi", "--out", "drawn"], "drawn"),
    ),
    "reproduce --out over a file": _added(
        "keep.json",
        Command(
            ["reproduce", "tile_257", "--variant", "predicted", "--out", "keep.json"], "keep.json"
        ),
    ),
    "reproduce --out in a folder of the user's": lambda box: Command(
        ["reproduce", "tile_257", "--variant", "predicted", "--out", "mine"], "mine"
    ),
    **{
        f"{words} of {odd}": lambda box, words=words, odd=odd: Command([*words.split(), odd])
        for words in (
            *("score", "score --config exp.yaml", "score measured.csv --peer", "lockstep"),
            *("replay exp.yaml", "replay exp.yaml server.jsonl --ticks", "report", "plot"),
            "workload",
        )
        for odd in ("pipe", "/dev/zero")
    },
    **{
        f"report of {name}": lambda box, name=name: Command(
            ["report", name, "--quiet", "--out", "page.html"], "page.html"
        )
        for name in _REPORTED
    },
    **{f"a {name} with numbers of 400 digits": _giant(name) for name in _REPORTED},
    **{
        f"a policy that says {ending} at {place.strip()}": _edited(
            "mine.py",
            place,
            f"{place[: len(place) - len(place.lstrip())]}{ending}\n{place}",
            Command(["run", "own.yaml", "--quiet", "--no-figures", "--out", "new"], "new"),
        )
        for ending in ("raise BaseException", "raise SystemExit(3)", "exit(0)")
        for place in ("@named", "        joining")
    },
    "a rate of 1e-9 that varies": _set(
        "workload.arrivals={kind: varying, rates: [{at_s: 0, rate: 1.0e-9}]}"
    ),
    "ticks with 400 digits": _edited(
        "ticks.csv",
        "0,20,5",
        f"0,{'9' * 400},5",
        Command(["replay", "exp.yaml", "server.jsonl", "--ticks", "ticks.csv"]),
    ),
    "a mapping as a request of a log": _edited(
        "decisions.jsonl", '["add",0]', '["add",{"a":1}]', Command(["lockstep", "decisions.jsonl"])
    ),
    "an option of 5,000 characters": lambda box: Command(["sweep", "--workers", "x" * 5000]),
    "a deep sweep file": _file(
        "sweep.yaml", SWEEP + "x: " + _DEEP, Command(["plan", "sweep.yaml"])
    ),
}
"""What each is, and how to make it in a box."""
