"""The doors: each damages the files of a box, and names the command that meets them."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import yaml

from sarathi_sim.profiler.bundle.tables import TABLES
from tests.hostile.box import Command
from tests.hostile.mutate import (
    damaged_bytes,
    damaged_csv,
    damaged_json,
    damaged_json_lines,
    damaged_lines,
    damaged_yaml,
    odd_path,
)
from tests.hostile.template import EXPERIMENT, RUNS
from tests.hostile.values import ODD_PATHS, yaml_value

BUNDLE = "profiles/dev/tiny/tp1"
_QUIET = ["--quiet", "--no-figures", "--out", "new"]
_TRACE = [
    "--set", "workload.lengths={kind: trace, path: trace.csv}",
    "--set", "workload.pd_ratio=null", "--set", "workload.requests=null",
    "--set", "workload.system_prompts={}", "--set", "workload.sessions=null",
]  # fmt: skip
_OWN = ["run", "own.yaml", *_QUIET]
_SUPPORT = ("list", "support", "--model")
Door = Callable[[Random, Path], Command]


def _damage(path: Path, how: Callable[[bytes, Random], bytes], rng: Random) -> None:
    """Damage what is in a file; now and then put a folder, a link or nothing in its place."""
    if rng.random() < 0.94:
        content = path.read_bytes()
        try:
            path.write_bytes(how(content, rng))
        except (ValueError, yaml.YAMLError):  # it was damaged before
            path.write_bytes(damaged_bytes(content, rng))
        return
    path.unlink()
    kind = rng.choice(("nothing", "folder", "loop", "zero", "pipe", "locked"))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "locked":
        path.write_text("x")
        path.chmod(0)
    elif kind != "nothing":
        path.symlink_to(path.name if kind == "loop" else "/dev/zero")


def _checks_or_runs(rng: Random, *more: str) -> Command:
    if rng.random() < 0.6:
        return Command(["run", "exp.yaml", *_QUIET, *more], "new")
    return Command([rng.choice(("run", "run", "sweep")), "exp.yaml", "--dry-run", *more])


def experiment(rng: Random, box: Path) -> Command:
    """A damaged configuration of a run or a sweep."""
    name = rng.choice(("exp.yaml", "sweep.yaml"))
    if rng.random() < 0.04:
        dry = ["--dry-run"] if rng.random() < 0.5 else []
        return Command([rng.choice(("run", "sweep")), odd_path(rng), *dry], "runs")
    _damage(box / name, damaged_yaml, rng)
    if name == "exp.yaml":
        return _checks_or_runs(rng)
    if rng.random() < 0.5:
        return Command(["sweep", name, "--dry-run"])
    return Command(["sweep", name, "--quiet", "--workers", "1", "--out", "new"], "new")


def damaged(name: str, how: Callable[[bytes, Random], bytes], *also: str, share: float = 0) -> Door:
    """A damaged file, met by a run; with probability ``share`` by the command ``also``."""

    def door(rng: Random, box: Path) -> Command:
        _damage(box / name, how, rng)
        return Command([*also]) if rng.random() < share else _checks_or_runs(rng)

    return door


def bundle(rng: Random, box: Path) -> Command:
    """A bundle with a damaged table; in most cases ``meta.yaml`` agrees with it."""
    table = rng.choice(("linear", "attn_prefill", "attn_decode", "send_recv"))
    _damage(box / BUNDLE / f"{table}.csv", damaged_csv, rng)
    if rng.random() < 0.85:
        _sign(box / BUNDLE)
    return Command(["fit", BUNDLE]) if rng.random() < 0.1 else _checks_or_runs(rng)


def _sign(folder: Path) -> None:
    """Put the digest of the tables that are there into ``meta.yaml``."""
    digest = hashlib.sha256()
    for name in TABLES:
        path = folder / f"{name}.csv"
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode())
            digest.update(content)
    described = yaml.safe_load((folder / "meta.yaml").read_text())
    described["content_sha256"] = digest.hexdigest()
    (folder / "meta.yaml").write_text(yaml.safe_dump(described))


def trace(rng: Random, box: Path) -> Command:
    more = _TRACE if rng.random() < 0.5 else [*_TRACE, "--set", "workload.arrivals={kind: trace}"]
    name = "trace.csv"
    if rng.random() < 0.06:
        more = [*more, "--set", f"workload.lengths.path='{odd_path(rng)}'"]
    elif rng.random() < 0.5:
        _damage(box / name, damaged_csv, rng)
    else:
        name = rng.choice(("trace.jsonl", "log.jsonl", "served.json"))
        how = damaged_json if name == "served.json" else damaged_json_lines
        _damage(box / name, how, rng)
        more = [*more, "--set", f"workload.lengths.path={name}"]
    if rng.random() < 0.2:
        column = rng.choice(("prompt=decode", "session=user", "turn=", "arrival=a.b", "=", "x=y"))
        return Command(["workload", name, "--column", column, "--out", "new"], "new")
    return _checks_or_runs(rng, *more)


def hugging_face(rng: Random, box: Path) -> Command:
    _damage(box / "hf/tiny/config.json", damaged_json, rng)
    named = rng.choice(("hf/tiny", "hf/tiny/config.json"))
    if rng.random() < 0.3:
        return Command([*_SUPPORT, named])
    return _checks_or_runs(rng, "--set", f"model={named}")


_KEYS = [
    f"{section}.{key}" if section else key
    for section, tree in [("", yaml.safe_load(EXPERIMENT)), *yaml.safe_load(EXPERIMENT).items()]
    if isinstance(tree, dict)
    for key in tree
] + ["workload.lengths.min", "scenarios.sarathi.policy.chunk_size", "sweep.grid", "sweep.seeds",
     "batching.kv_reservation", "workload.declared", "batching.max_in_flight", "sweep.sample",
     "cluster.layers_per_stage", "compare.speedup.over", "validation.repeats"]  # fmt: skip


_NO_KEYS = ("", ".", "a..b", "SEED", "x" * 9999, ".".join("a" * 5000), "1:30", "[", "é", "<<")


def assignment(rng: Random, box: Path) -> Command:
    """``--set`` of any key to any value, and of what is no key."""
    more = []
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(_KEYS)
        if rng.random() < 0.15:
            key = rng.choice(
                (f"{key}.x", f"{key}.0", f".{key}", f"scenarios.orca.{key}", *_NO_KEYS)
            )
        text = f"{key}{rng.choice(('=', '=', '=', '=', '==', '', ': '))}{yaml_value(rng)}"
        more += ["--set", text.replace("\x00", "")]
    if rng.random() < 0.3:
        return Command(["sweep", "sweep.yaml", "--dry-run", *more])
    return _checks_or_runs(rng, *more)


_NO_FILES = ("pipe", "/dev/zero", "loop", "dangling", "mine", "locked.txt", "nowhere")


_DATA = (
    ("measured.csv", damaged_csv, "lab score measured.csv --workers 1 --quiet"),
    ("peer.csv", damaged_csv, "lab score measured.csv --peer peer.csv --workers 1"),
    ("server.jsonl", damaged_json_lines, "score server.jsonl --config exp.yaml"),
    ("served.json", damaged_json, "score served.json --config exp.yaml"),
    ("decisions.jsonl", damaged_json_lines, "lab lockstep decisions.jsonl"),
    ("decisions.jsonl", damaged_json_lines, "lab lockstep decisions.jsonl --json"),
)


def data(rng: Random, box: Path) -> Command:
    """A damaged table of servers, a server's run, or a log of decisions; or a pipe."""
    name, how, call = rng.choice(_DATA)
    if rng.random() < 0.1:
        odd = rng.choice(_NO_FILES)
        return Command([odd if word == name else word for word in call.split()])
    path = box / name
    _damage(path, how, rng)
    if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o400:
        if rng.random() < 0.2:
            path.write_bytes(gzip.compress(path.read_bytes()))
        if rng.random() < 0.05:
            _damage(path, damaged_bytes, rng)
    return Command(call.split())


def load_tool(rng: Random, box: Path) -> Command:
    name = rng.choice([*RUNS])
    _damage(box / name, damaged_json_lines if name.endswith("l") else damaged_json, rng)
    if rng.random() < 0.1:
        return _out(f"tune {name} --config stacked.yaml --quiet", "new")
    return Command(["score", name, "--config", "stacked.yaml", "--quiet"])


def calibration(rng: Random, box: Path) -> Command:
    """A damaged calibration, of a run or of a server's recorded one."""
    _damage(box / "calibration.yaml", damaged_yaml, rng)
    calls = ("run stacked.yaml --dry-run", "run stacked.yaml --quiet --no-figures --out new")
    call = rng.choice((*calls, "score server.jsonl --config stacked.yaml"))
    argv = [*call.split(), "--set", "calibration=calibration.yaml"]
    return Command(argv, "new") if "new" in argv else Command(argv)


_ENDINGS = (
    *("raise BaseException", "raise SystemExit(3)", "exit(0)", "raise GeneratorExit", "1 / 0"),
    *("raise type('X', (Exception,), {'__str__': lambda self: 1 / 0})", "assert False"),
    *("raise ValueError('x' * 10**6)", "raise ValueError('a\\nb')", "return", "return 5"),
    *("raise MemoryError", "raise RecursionError", "raise StopIteration", "raise OSError(5, 'x')"),
    *("return Plan(((self, 1),))", "return Plan()", "return Plan((), -1)", "return NotImplemented"),
    *("import sys; sys.stdout = None", "import os; os.chdir('/')", "view.x = 1", "del view"),
    "raise UnicodeDecodeError('utf-8', b'', 0, 1, 'x')",
    "raise ExceptionGroup('x', [ValueError()])",
)  # fmt: skip
_PLACES = (
    *("@named", "    def plan", "        joining", "        if joining", "        return DECODES"),
)


def policy(rng: Random, box: Path) -> Command:
    """A policy of the user's that does what none should, or a damaged file of one."""
    path = box / "mine.py"
    if rng.random() < 0.3:
        _damage(path, rng.choice((damaged_bytes, damaged_lines)), rng)
    else:
        place, ending = rng.choice(_PLACES), rng.choice(_ENDINGS)
        indent = " " * (len(place) - len(place.lstrip()))
        if place == "    def plan":
            ending = f"def __post_init__(self):\n{indent}    {ending}\n"
        text = path.read_text()
        path.write_text(text.replace(place, f"{indent}{ending}\n{place}", 1))
    if rng.random() < 0.2:
        key = rng.choice(("file", "name", "sha256", "prompts"))
        return Command([*_OWN, "--set", f"policy.{key}={yaml_value(rng)}".replace("\x00", "")])
    return Command(_OWN, "new")


_THE_USERS = (
    *("analysis.ipynb", ".git", "notes.txt", "summary.json.bak"),
    *("é", "0123456789abcdef", ".lock", "failed", "figures"),
)


def _vandalise(folder: Path, rng: Random) -> None:
    """Damage a file of a result, remove it, put something else in its place, or add one."""
    for _ in range(rng.choice((1, 1, 2))):
        files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        path = rng.choice(sorted(files))
        kind = rng.random()
        if kind < 0.3:
            how = {".json": damaged_json, ".yaml": damaged_yaml, ".csv": damaged_csv}
            _damage(path, how.get(path.suffix, damaged_bytes), rng)
        elif kind < 0.4:
            path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size + 1)])
        elif kind < 0.5:
            path.unlink()
        elif kind < 0.9:
            new = path.with_name(rng.choice(_THE_USERS))
            if not new.exists():
                if rng.random() < 0.3:
                    new.mkdir()
                    new /= "HEAD"
                new.write_text(f"the user's {new.relative_to(folder)}\n")
        else:
            new = path.with_name("linked")
            if not new.is_symlink():
                new.symlink_to(rng.choice(("loop", "../mine", "linked", "../../mine", "/dev/zero")))


def _out(line: str, target: str) -> Command:
    return Command([*line.split(), "--out", target], target)


def result(rng: Random, box: Path) -> Command:
    """The damaged result of a run, and commands that read or replace it."""
    _vandalise(box / "result", rng)
    kind = rng.random()
    if kind < 0.35:
        return _out("run exp.yaml --quiet --no-figures", "result")
    if kind < 0.75:
        other = rng.choice(("result/sarathi", "result", "swept"))
        return Command(["compare", "result/orca", other])
    if kind < 0.85:
        return _out("sweep sweep.yaml --workers 1 --quiet", "result")
    if kind < 0.9:
        _vandalise(box / "drawn", rng)
        return _out("compare result/orca result/sarathi", "drawn")
    if kind < 0.95:
        return _out("plot swept --metric makespan_s", "result")
    return _out("plot result --quiet", "new")


_REPORTED = (
    *("result", "swept", "drawn", "scored", "recorded", "capacities", "recommended"),
    "sensitivity",
)


def report(rng: Random, box: Path) -> Command:
    name = rng.choice(_REPORTED)
    _vandalise(box / name, rng)
    also = [rng.choice(_REPORTED)] if rng.random() < 0.2 else []
    return Command(["report", name, *also, "--quiet", "--out", "page.html"], "page.html")


def swept(rng: Random, box: Path) -> Command:
    """The damaged folder of a sweep, and commands that read, complete or replace it."""
    _vandalise(box / "swept", rng)
    kind = rng.random()
    call = _out("sweep sweep.yaml --workers 1 --quiet", "swept")
    if kind < 0.6:
        return Command([*call.argv, "--resume"], "swept")
    if kind < 0.8:
        return call
    if kind < 0.9:
        return _out("run exp.yaml --quiet --no-figures", "swept")
    if kind < 0.95:
        run = rng.choice(sorted((box / "swept/runs").glob("*")) or [box / "swept"])
        return Command(["compare", str(run.relative_to(box)), "result/orca"])
    return _out("plot swept --quiet --metric makespan_s", "new")


_OUTS = (
    *(path for path in ODD_PATHS if not path.startswith(("/", "~root"))),
    *("exp.yaml", "exp.yaml/x", "mine/new", "link", "link/new", "new/../mine", "mine/../result"),
    *("result", "./result/", "result/orca", "swept", "swept/runs", "drawn", "profiles", "hf/tiny"),
    *("-", "--", "a\nb", "\udcff", "*", "$(x)", "a/" * 2000 + "b", "a/" * 100 + "b", "x" * 255),
)


def out(rng: Random, box: Path) -> Command:
    """``--out`` and ``--json`` on what is there already, or cannot be there."""
    target = rng.choice(_OUTS)
    calls = {
        "run exp.yaml --quiet --no-figures": 2.0,
        "sweep sweep.yaml --workers 1 --quiet": 1.0,
        "sweep sweep.yaml --workers 1 --quiet --resume": 1.0,
        "compare result/orca result/sarathi": 1.0,
        "plot swept --quiet --metric makespan_s": 1.0,
        f"fit {BUNDLE}": 0.2,  # seconds, where the others take milliseconds
        "lab reproduce --list tile_257": 1.0,
    }
    return _out(rng.choices([*calls], [*calls.values()])[0], target)


DOORS: dict[str, tuple[Door, int]] = {
    "experiment": (experiment, 20),
    "model": (damaged("model.yaml", damaged_yaml, *_SUPPORT, "model.yaml", share=0.3), 10),
    "device": (damaged("device.yaml", damaged_yaml), 9),
    "meta": (damaged(f"{BUNDLE}/meta.yaml", damaged_yaml, "fit", BUNDLE, share=0.1), 9),
    "bundle": (bundle, 12),
    "trace": (trace, 8),
    "hugging face": (hugging_face, 8),
    "--set": (assignment, 10),
    "data": (data, 8),
    "load tool": (load_tool, 6),
    "calibration": (calibration, 4),
    "policy": (policy, 5),
    "report": (report, 4),
    "result": (result, 5),
    "sweep": (swept, 5),
    "--out": (out, 4),
}
"""Each door, and how many of a hundred inputs go through it."""
