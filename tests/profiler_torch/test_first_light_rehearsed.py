"""``sarathi-sim first-light`` from end to end without a GPU: on a pretended one, and on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.profiler.bundle.schema import bundle_path, write_bundle
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.first_light import one_step
from sarathi_sim.profiler.first_light.hour import LATE, Ledger, Options, _Hour, first_light
from sarathi_sim.profiler.first_light.machine_steps import correctness, off_ceiling, usual_product
from sarathi_sim.profiler.first_light.model_steps import tables
from sarathi_sim.profiler.first_light.steps import STEPS, HourStep, Task
from sarathi_sim.profiler.planning.journal import ProfileError
from sarathi_sim.profiler.shard.attention import SdpaAttention
from tests.patience import PATIENCE_S
from tests.processes import children, gone
from tests.profiler_torch import fake_cuda
from tests.profiler_torch.fake_cuda import pretend_for_good
from tests.sampled import stack_bundle

ROOT = Path(__file__).resolve().parents[2]
SEES_A_GPU = os.pathsep.join(map(str, (Path(__file__).parent / "pretended", ROOT)))
#: It is imported on the pretended GPU alone: its operators look for one when they are.
needs_xformers = pytest.mark.skipif(
    find_spec("xformers") is None,
    reason="xformers is not installed: pip install --no-deps xformers",
)
NAMES = [step.name for step in STEPS]


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "sarathi_sim", "first-light", "--dry-run", "--out", str(out)]


def forked(_: Any, name: str, task: Task) -> int:
    """A step's process on the pretended GPU, forked from this one: it imports nothing again."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    try:
        log = os.open(task.folder / "logs" / f"{name}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ["PYTHONPATH"] = SEES_A_GPU
        pretend_for_good()
        sys.argv = ["one_step", str(os.getppid()), name, str(task.folder), str(task.seconds), "1"]
        code = one_step.main()
    finally:
        os._exit(code)


def check_rehearsal(out: Path) -> None:
    """Every step ended well, and the archive holds it."""
    ledger = Ledger(out, rehearsal=True)
    logs = {log.name: log.read_text()[-500:] for log in (out / "logs").iterdir()}
    assert [entry.state for entry in ledger.entries] == ["done"] * len(NAMES), (
        ledger.entries,
        logs,
    )
    assert [entry.step for entry in ledger.entries] == NAMES
    assert {entry.gpu for entry in ledger.entries} == {"NVIDIA H100 80GB HBM3"}
    summary = (out / "summary.txt").read_text().splitlines()
    assert summary[0] == "rehearsal on NVIDIA H100 80GB HBM3: 13 of 13 steps are done"
    assert len(summary) <= 20
    assert sum("tp1 over vllm, %: preproj " in line for line in summary) == 2
    with zipfile.ZipFile(out.with_name("hour.zip")) as packed:
        names = packed.namelist()
        base = "profiles/h100-80gb-hbm3/tiny-llama-13b/tp1"
        meta = yaml.safe_load(packed.read(f"{base}/meta.yaml"))
    assert "xformers 0.0.35 memory_efficient_attention" in meta["environment"]["attention"]
    assert meta["dtype"] == "bfloat16"
    assert {f"logs/{name}.log" for name in NAMES} | {f"{base}/linear.csv"} <= set(names)
    assert "validation/validation.json" in names


@pytest.mark.slow
@needs_xformers
def test_steps_on_a_pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that measure no model. xformers' own Python code checks what it is asked, torch the
    shapes."""
    with fake_cuda.pretend():
        pass  # what it imports, the steps need not import again
    monkeypatch.setattr(_Hour, "_run_process", forked)
    out = tmp_path / "hour"
    steps = [step for step in STEPS if step.name in ("probe", "ceilings", "methods")]
    assert first_light(Options(out, tmp_path / "hour.zip", rehearsal=True), lambda _: None, steps)
    entries = Ledger(out, rehearsal=True).entries
    assert [(e.step, e.state) for e in entries] == [(step.name, "done") for step in steps]
    assert {entry.gpu for entry in entries} == {"NVIDIA H100 80GB HBM3"}
    with zipfile.ZipFile(tmp_path / "hour.zip") as packed:
        assert {f"logs/{step.name}.log" for step in steps} <= set(packed.namelist())


@pytest.mark.slow
@needs_xformers
def test_the_whole_command_in_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "hour"
    done = subprocess.run(
        command(out), cwd=ROOT, env=os.environ | {"PYTHONPATH": SEES_A_GPU},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr)
    check_rehearsal(out)


@pytest.mark.slow
def test_killed_at_every_step_it_ends_as_undisturbed(tmp_path: Path) -> None:
    """kill -9 of the command half a second into each step: nothing of it is left running, and the
    same command goes on with that step."""
    out, killed = tmp_path / "hour", set[str]()
    while True:
        process = subprocess.Popen(command(out), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            step = line.partition(":")[0]
            if "(up to" in line and step not in killed:
                killed.add(step)
                time.sleep(0.5)
                left = [process.pid, *children(process.pid)]
                process.kill()
                break
        else:
            break
        process.wait()
        process.stdout.close()
        assert gone(left, PATIENCE_S)
        entries = Ledger(out, rehearsal=True).entries
        assert [e.step for e in entries if e.state != "done"] == []
    assert process.wait() == 0
    assert killed == set(NAMES)
    done = [entry.step for entry in Ledger(out, rehearsal=True).entries]
    assert [step for step in done if step != "probe"] == NAMES[1:]
    with zipfile.ZipFile(out.with_name("hour.zip")) as packed:
        assert packed.testzip() is None
        assert len(json.loads(packed.read("ledger.json"))["entries"]) == len(done)


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """Importing torch takes longer than that."""
    before = set(children(os.getpid()))
    options = Options(tmp_path / "hour", tmp_path / "hour.zip", rehearsal=True)
    steps = (HourStep("correctness", "", 0.3),)
    assert not first_light(options, lambda _: None, steps)
    entry = Ledger(tmp_path / "hour", rehearsal=True).entries[0]
    assert entry.state == LATE
    assert not (tmp_path / "hour" / "results" / "correctness.json").exists()
    assert set(children(os.getpid())) == before


def test_a_terminated_command_books_the_step(tmp_path: Path) -> None:
    out = tmp_path / "hour"
    process = subprocess.Popen(command(out), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "probe" in process.stdout.readline()
    while not (left := children(process.pid)):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
    process.stdout.close()
    assert gone(left, PATIENCE_S)
    assert [e.state for e in Ledger(out, rehearsal=True).entries] == ["interrupted"]


@pytest.mark.slow
def test_every_step_has_its_work_and_needs_no_simulator() -> None:
    for name in NAMES:
        assert callable(one_step.WORKS[name])
    code = (
        "import sys\n"
        "for name in ('simpy', 'sarathi_sim.simulator', 'sarathi_sim.experiments', 'bokeh',"
        " 'matplotlib', 'psutil', 'sklearn', 'joblib'):\n"
        "    sys.modules[name] = None\n"
        "import sarathi_sim.profiler.first_light.hour\n"
        "import sarathi_sim.profiler.first_light.one_step as steps\n"
        "import sarathi_sim.profiler.measuring.measure, sarathi_sim.profiler.measuring.shard_ops\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def task(tmp_path: Path) -> Task:
    return Task(tmp_path, 60, rehearsal=True)


def test_right_attention_is_within_rounding(tmp_path: Path) -> None:
    found = correctness(task(tmp_path))
    each = found.facts["over_tolerance"]
    assert set(each) == {"sdpa, MHA", "sdpa, GQA"}
    for checks in each.values():
        assert set(checks) == {"prompt", "chunks", "decodes, equal", "decodes, unequal"}
        assert all(off <= 1 for off in checks.values())


def one_more_key(self: Any, chunk: int, context: int) -> Any:
    """A mask that shows each query the key after its own."""
    hidden = torch.ones(chunk, context + chunk, dtype=torch.bool).triu(context + 2)
    return torch.zeros(chunk, context + chunk).masked_fill_(hidden, float("-inf"))


@pytest.mark.parametrize(
    ("method", "wrong", "what"),
    [
        ("prefill_bias", one_more_key, "prompt"),
        ("skewed_bias", lambda self, contexts, stride: None, "decodes, unequal"),
    ],
)
def test_wrong_attention_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, wrong: Any, what: str
) -> None:
    monkeypatch.setattr(SdpaAttention, method, wrong)
    with pytest.raises(ProfileError, match=f"sdpa, MHA: {what} is .* times as far from float64"):
        correctness(task(tmp_path))


def test_a_ceiling_that_is_off() -> None:
    """A tenth below what is usual is let through; so is anything up to the data sheet."""
    usual, most = {"copy": 4.0e12, "product": 7.0e14}, {"copy": 4.8e12, "product": 9.9e14}
    assert off_ceiling({"copy": 3.61e12, "product": 9.8e14}, usual, most) == ""
    slow = off_ceiling({"copy": 3.0e12, "product": 7.0e14}, usual, most)
    assert slow.startswith("the copy is 25% below what this GPU usually gives")
    fast = off_ceiling({"copy": 4.0e12, "product": 2.6e16}, usual, most)
    assert fast == "the product is above the data sheet: the timing is wrong"


@pytest.mark.parametrize("device", ["h200-sxm", "h100-80g-sxm", "a100-80g-sxm"])
def test_the_usual_product_is_the_kernel_tables(device: str) -> None:
    spec = load_device(device)
    assert 0.5 < usual_product(spec) / spec.peak_flops < 1


def test_the_difference_from_the_tables_is_what_was_put_in(tmp_path: Path) -> None:
    """vLLM's own kernels a tenth slower differ from vLLM's by 10 %, op by op."""
    model = load_model("llama-3-8b")
    bundle = stack_bundle("h100-80g-sxm", model, 1, Kernels("vllm"), max_tokens=8192)
    slower = {
        name: frame.assign(time_us=1.1 * frame["time_us"])
        for name, frame in bundle.tables().items()
        if len(frame)
    }
    meta = replace(bundle.meta, device="cpu", source="imported", kernels=None)
    here = task(tmp_path)
    write_bundle(
        replace(bundle, meta=meta, **slower), bundle_path(here.profiles, "cpu", model.name, 1)
    )
    found = tables(here)
    by_op = found.facts["cpu/llama-3-8b/tp1 over vllm"]
    for op in ("preproj", "ffn_ln2", "others", "attn_prefill", "attn_decode"):
        assert by_op[op]["median"] == pytest.approx(1.1, rel=1e-3)
    (line,) = (line for line in found.facts["lines"] if "over vllm" in line)
    assert "attn_decode +10" in line
