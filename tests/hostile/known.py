"""Inputs that once ended in a traceback, a hang, or the loss of a user's file.

Others have a test of their own, which has the message, too: tests/experiments/test_doors.py,
test_user_files.py, test_not_ours.py and test_policy_file.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.hostile.box import Command
from tests.hostile.doors import _REPORTED, BUNDLE, _out
from tests.hostile.template import HF_CONFIG, SWEEP
from tests.hostile.values import laughs

Known = Callable[[Path], Command]
_TAGS = ("!!bool foo", "!!timestamp foo", "!!map [a, b]", "!!set [a]", "!!int ''")
_PLACES = {
    "exp.yaml": "seed: 7", "device.yaml": "num_sms: 64", "model.yaml": "num_layers: 4",
    f"{BUNDLE}/meta.yaml": "tile: 128",
}  # fmt: skip
_CHECK = Command(["run", "exp.yaml", "--dry-run"])
_TINY = Command([*_CHECK.argv, "--set", "model=hf/tiny"])


def _set(*assignments: str, dry: bool = True) -> Known:
    more = [word for text in assignments for word in ("--set", text)]
    return lambda box: Command(["run", "exp.yaml", *(["--dry-run"] if dry else []), *more])


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
    return _file("hf/tiny/config.json", json.dumps({**HF_CONFIG, **keys}), _TINY)


def _giant(name: str) -> Known:
    """A result all of whose numbers have 400 digits more."""

    def prepare(box: Path) -> Command:
        path = box / name / "summary.json"
        path.write_text(re.sub(r"(: -?\d+)\b", rf"\g<1>{'0' * 400}", path.read_text()))
        return _out(f"report {name} --quiet", "page.html")

    return prepare


_COSTLY = {
    "vocab_size": 10**400, "hidden_size": 10**12, "num_local_experts": 8, "kv_lora_rank": 512,
    "mlp_bias": True, "quantization_config": {"bits": 4}, "hidden_act": "relu",
    "layer_types": ["sliding_attention"] * 4, "sliding_window": 16,
}  # fmt: skip
_DEEP = "[" * 100_000 + "]" * 100_000
_DECLARED = ("workload.declared=exact", "batching.kv_reservation=declared")

KNOWN: dict[str, Known] = {
    **{
        f"{name} {tag}": _edited(name, old, f"{old.partition(':')[0]}: {tag}")
        for name, old in _PLACES.items()
        for tag in _TAGS
    },
    **{f"key {tag}": _edited("exp.yaml", "seed: 7", f"? {tag}\n: 7") for tag in _TAGS},
    **{f"root {tag}": _file("exp.yaml", f"{tag}\n") for tag in _TAGS},
    **{f"--set seed={tag}": _set(f"seed={tag}") for tag in _TAGS},
    "aliases without end": _edited("device.yaml", "notes: made up", f"notes: {laughs(9)}"),
    "rate: 1:30": _edited("exp.yaml", "rate: 50.0", "rate: 1:30"),
    "JSON 100,000 deep": _file("hf/tiny/config.json", _DEEP, _TINY),
    **{f"{key} {value!s:.20}": _config(**{key: value}) for key, value in _COSTLY.items()},
    "chunk_size 16777216": _set(
        "policy={name: sarathi, chunk_size: 16777216}", "scenarios={}", dry=False
    ),
    "max_batch 10000000": _set("batching.max_batch=10000000", *_DECLARED, dry=False),
    "a note in figures": _file(
        "drawn/notes.txt", "the user's\n", _out("compare result/orca result/sarathi", "drawn")
    ),
    "reproduce --out in a folder of the user's": lambda box: _out(
        "lab reproduce tile_257 --variant predicted", "mine"
    ),
    **{
        f"{words} of {odd}": lambda box, words=words, odd=odd: Command([words, odd])
        for words in ("report", "plot")
        for odd in ("pipe", "/dev/zero")
    },
    **{
        f"report of {name}": lambda box, name=name: _out(f"report {name} --quiet", "page.html")
        for name in _REPORTED
    },
    **{f"a {name} with numbers of 400 digits": _giant(name) for name in _REPORTED},
    "a mapping as a request of a log": _edited(
        "decisions.jsonl",
        '["add",0]',
        '["add",{"a":1}]',
        Command(["lab", "lockstep", "decisions.jsonl"]),
    ),
    "a deep sweep file": _file(
        "sweep.yaml", SWEEP + "x: " + _DEEP, Command(["sweep", "sweep.yaml", "--dry-run"])
    ),
}
"""What each is, and how to make it in a box."""
