"""``sarathi-sim lab first-light``: its loop with stand-ins for the processes, and the processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.experiments.lab.engines import first_light as fl
from sarathi_sim.profiler.bundle.schema import bundle_path, write_bundle
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.planning.grid import ProfileError
from tests.patience import PATIENCE_S
from tests.processes import children, gone
from tests.sampled import stack_bundle

pytestmark = pytest.mark.lab
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
ROOT = Path(__file__).resolve().parents[2]
H200 = {"device": "cuda", "device_name": "h200", "gpu": "NVIDIA H200"}
A_PROFILE = fl.HourStep("a", 100, options={"model": "llama-13b"})
THREE = (fl.HourStep("probe", 20, 20), A_PROFILE, fl.HourStep("b", 100, 100))


class Machine:
    """Stands for the processes: what was started, for how long at most, and how steps end."""

    def __init__(self) -> None:
        self.names, self.seconds = "", 0.0
        self.ends: dict[str, Callable[[], tuple[str, str]]] = {}

    def run(self, name: str, seconds: float) -> tuple[str, str]:
        self.names, self.seconds = f"{self.names} {name}".strip(), seconds
        return self.ends.get(name, lambda: (fl.DONE, f"{name} ran"))()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    stand_in = Machine()
    monkeypatch.setattr(fl.Hour, "_run_process", lambda _, name, __, s: stand_in.run(name, s))
    monkeypatch.setattr(fl, "words_of", lambda *_: [])
    return stand_in


def hour(folder: Path, out: str = "hour", minutes: float = 60, **more: Any) -> tuple[bool, str]:
    lines: list[str] = []
    one = fl.Hour(folder / out, lines.append, more.get("rehearsal", False))
    return one.run(minutes, more.get("resume"), THREE), "\n".join(lines)


def test_only_the_probe_is_repeated_and_a_failed_profile(tmp_path: Path, machine: Machine) -> None:
    machine.ends = {"a": lambda: (fl.FAILED, "GPU lost"), "b": lambda: (fl.LATE, "too late")}
    done, text = hour(tmp_path)
    assert not done and machine.names == "probe a a b"
    assert "a: failed in 0 s. GPU lost" in text and "1 of 3 steps are done" in text
    machine.ends = {}
    assert not hour(tmp_path, minutes=1.5)[0]  # b is not begun: it could end too late
    assert machine.names == "probe a a b probe a"
    assert machine.seconds == pytest.approx(90, abs=1)
    done, text = hour(tmp_path)
    assert done and machine.names == "probe a a b probe a probe b"
    assert "a: done before" in text and "3 of 3 steps are done" in text
    assert "b ran" in (tmp_path / "hour" / "summary.txt").read_text()
    machine.ends, machine.names = {"probe": lambda: (fl.FAILED, "no GPU")}, ""
    assert "no GPU" in hour(tmp_path, "other")[1] and machine.names == "probe"


def test_an_hour_goes_on_from_its_archive(tmp_path: Path, machine: Machine) -> None:
    """On another machine, and where the folder was lost; a signal is in the ledger then, too."""

    def interrupt() -> tuple[str, str]:
        raise KeyboardInterrupt

    machine.ends["b"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        hour(tmp_path)
    machine.ends = {}
    (tmp_path / "hour").rename(tmp_path / "lost")
    archive = tmp_path / "hour.zip"
    assert [e.state for e in fl.read_ledger(archive).entries] == ["done", "done", "interrupted"]
    (tmp_path / "other").mkdir()
    assert hour(tmp_path / "other", resume=archive)[0]
    done, text = hour(tmp_path)
    assert done and "made from" in text and "a: done before" in text
    assert machine.names == "probe a b probe b probe b"
    assert "going on from it, not from" in hour(tmp_path, resume=archive)[1]


def test_nothing_foreign_is_touched(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("mine")
    (tmp_path / "new.zip").write_text("mine")
    assert hour(tmp_path)[0] and hour(tmp_path, "other")[0]
    (tmp_path / "cut.zip").write_bytes((tmp_path / "hour.zip").read_bytes()[:-30])
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("mine", {}, "mine: exists and is not of first-light"),
        ("new", {}, "new.zip: exists and is not of first-light, or is damaged"),
        ("cut", {}, "cut.zip: exists and is not of first-light, or is damaged"),
        ("third", {"resume": tmp_path / "none.zip"}, "--resume .*none.zip: no such file"),
        ("hour", {"rehearsal": True}, "hour: is no rehearsal: go on without --dry-run"),
    )
    for out, more, problem in cases:
        with pytest.raises(ProfileError, match=problem):
            hour(tmp_path, out, **more)
    (tmp_path / "other.zip").rename(tmp_path / "hour.zip")
    with pytest.raises(ProfileError, match=r"hour.zip: exists and is not of .*hour"):
        hour(tmp_path)
    ledger = tmp_path / "hour" / "ledger.json"
    ledger.write_text('{"format": "sarathi-sim first light 2", "entries": [{}]}')
    with pytest.raises(ProfileError, match="hour: exists and is not of first-light, or is damaged"):
        hour(tmp_path)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["mine.txt"]


def test_an_archive_has_all_but_scratch_files(tmp_path: Path, machine: Machine) -> None:
    hour(tmp_path)
    folder, points = tmp_path / "hour" / "profiles", "m/.tp1.work/ab.jsonl"
    for name in ("m/tp1/a.csv", points, "m/.tp1-0123abcd/a.csv", "m/.a.csv.partial", "lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1,2")
    fl.pack(tmp_path / "hour", tmp_path / "hour.zip")
    with zipfile.ZipFile(tmp_path / "hour.zip") as packed:
        profiles = {f"profiles/{name}" for name in ("m/tp1/a.csv", points)}
        assert {*packed.namelist()} == {"ledger.json", "summary.txt"} | profiles


def on_h200(tmp_path: Path, **more: str) -> Path:
    (tmp_path / "results").mkdir(exist_ok=True)
    (tmp_path / "results" / "probe.json").write_text(json.dumps(H200 | more))
    return tmp_path


def test_the_steps_are_commands(tmp_path: Path) -> None:
    steps, out = {step.name: step for step in fl.STEPS}, on_h200(tmp_path)
    expected = {
        "llama-13b": "--attention=xformers --dtype=bf16 --set=device_name=h200 --budget=135.0",
        "llama-13b-cudnn": "--attention=cudnn --set=device_name=h200-cudnn --set=max_seconds=80.0",
        "llama-3-8b-tp2": f"--tp=2 --set=collectives={out}/published/llama-3-8b/tp2",
        "fp8": "--weights=fp8 --set=device_name=h200-fp8",
        "validate": "--set=validation.limit_s=25 --set=validation.dtype=bfloat16",
    }
    for name, words in expected.items():
        assert {*words.split()} <= {*fl.words_of(steps[name], out, 100, False)}, name
    with pytest.raises(ProfileError, match="no kernels of this GPU ship"):
        fl.words_of(steps["llama-3-8b-tp2"], on_h200(tmp_path, gpu="NVIDIA T4"), 100, False)
    small = fl.words_of(steps["fp8"], on_h200(tmp_path, device="cpu"), 100, True)
    assert {"--model=tiny-llama-40m", "--weights=dtype", "--set=max_tokens=6"} <= set(small)


def test_the_difference_from_the_tables_is_what_was_put_in(tmp_path: Path) -> None:
    """vLLM's own kernels a tenth slower take 10 % longer than vLLM's, op by op."""
    model, out = load_model("llama-3-8b"), on_h200(tmp_path)
    bundle = stack_bundle("h200-sxm", model, 1, Kernels("vllm"), max_tokens=2048)
    rows = {name: frame for name, frame in bundle.tables().items() if len(frame)}
    slower = {name: f.assign(time_us=1.1 * f["time_us"]) for name, f in rows.items()}
    meta = replace(bundle.meta, device="h200", source="imported", kernels=None)
    path = bundle_path(out / "profiles", "h200", model.name, 1)
    write_bundle(replace(bundle, meta=meta, **slower), path)
    assert "comparisons in results/tables.json" in fl.tables(out, False)
    by_op = json.loads((out / "results" / "tables.json").read_bytes())
    ours = by_op["h200/llama-3-8b/tp1 over vllm, %"]
    assert {*model.gemms(1), "others", "attn_prefill", "attn_decode"} <= ours.keys()
    assert ours == dict.fromkeys(ours, pytest.approx(10, abs=0.1))


def command(out: Path, **environment: str) -> subprocess.Popen[str]:
    words = f"{sys.executable} -m sarathi_sim lab first-light --dry-run --out {out}".split()
    variables = os.environ | environment
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=variables)


@needs_torch
@pytest.mark.slow
@pytest.mark.skipif(find_spec("xformers") is None, reason="xformers is not installed")
def test_a_rehearsal_on_a_pretended_gpu(tmp_path: Path) -> None:
    pretended = ROOT / "tests" / "profiler_torch" / "pretended"
    process = command(tmp_path / "hour", PYTHONPATH=f"{pretended}{os.pathsep}{ROOT}")
    text = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, text
    entries = fl.read_ledger(tmp_path / "hour.zip").entries
    assert [(e.step, e.state) for e in entries] == [(step.name, "done") for step in fl.STEPS]
    assert "NVIDIA H100 80GB HBM3" in entries[0].why
    with zipfile.ZipFile(tmp_path / "hour.zip") as packed:
        meta = packed.read("profiles/h100-80gb-hbm3/tiny-llama-40m/tp1/meta.yaml").decode()
        assert {"validation/validation.json", "logs/fp8.log"} <= {*packed.namelist()}
    assert "xformers 0.0.35 memory_efficient_attention" in meta and "dtype: bfloat16" in meta


@needs_torch
@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """SIGTERM is booked; kill -9 half a second into steps of each kind leaves nothing running, and
    the same command goes on with that step."""
    out, left = tmp_path / "hour", list[int]()
    for step in ("probe", "llama-13b", "tables", "validate", ""):
        process, how = command(out), signal.SIGTERM if step == "probe" else signal.SIGKILL
        for line in process.stdout or ():
            if step and line.startswith(f"{step}: up to"):
                time.sleep(0.5)
                left += [process.pid, *children(process.pid)]
                process.send_signal(how)
        assert process.wait(PATIENCE_S) == {"probe": 143, "": 0}.get(step, -9)
        assert gone(left, PATIENCE_S)
    first, *others = fl.read_ledger(out.with_name("hour.zip")).entries
    assert first.state == "interrupted"
    done = [(e.step, e.state) for e in others if e.step != "probe"]
    assert done == [(step.name, "done") for step in fl.STEPS[1:]]


def test_a_process_that_takes_too_long_or_fails(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    one = fl.Hour(tmp_path / "hour", lambda _: None, rehearsal=True)
    assert not one.run(60, None, (fl.HourStep("probe", 0.3, 0),))
    assert one.ledger.entries[0].state == fl.LATE
    assert set(children(os.getpid())) == before
    failed = one._run_process("check", ["run", "none"], 100)
    assert failed[0] == fl.FAILED and failed[1].startswith("error: ") and "none" in failed[1]


def test_a_gpu_node_has_what_it_needs() -> None:
    """It has torch, and NumPy, but nothing that draws; what each carried package needs is carried,
    too. Importing the module needs not even torch."""
    without = "('torch', 'bokeh', 'matplotlib', 'distributed', 'playwright')"
    code = f"import sys; sys.modules |= dict.fromkeys({without}); import {fl.MODULE}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    (needs,) = re.findall(r"GPU_NEEDS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())
    carried = set(needs.replace("\\", "").split())
    assert {"pydantic", "simpy", "xformers"} <= carried
    for package in carried:
        with suppress(PackageNotFoundError):  # those of NVIDIA need nothing
            own = [need for need in requires(package) or [] if "extra ==" not in need]
            names = {re.split(r"[^A-Za-z0-9_.-]", need)[0].replace("_", "-") for need in own}
            assert names <= carried | {"torch", "numpy"}, package
