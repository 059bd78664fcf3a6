"""``profile`` on a pretended GPU (fake_cuda.py): it ends, whatever fails, and goes on elsewhere."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode

from sarathi_sim.profiler.bundle.schema import Bundle, load_bundle
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.measuring import measure, shard_ops
from sarathi_sim.profiler.measuring.measure import profile
from sarathi_sim.profiler.planning.grid import Limits, ProfileError, Settings
from sarathi_sim.profiler.shard import environment, timing
from sarathi_sim.profiler.shard.timing import GpuState, Sampler
from tests.patience import PATIENCE_S
from tests.profiler_torch import fake_cuda

ROOT = Path(__file__).resolve().parents[2]
TINY = replace(load_model("tiny-llama-40m"), hidden_size=256, num_heads=4, num_kv_heads=2,
               head_dim=64, ffn_hidden_size=512, vocab_size=512, num_layers=2)  # fmt: skip
SETTINGS = Settings(
    TINY, (1,), "cuda", "bfloat16", Path(), Limits(16, 32, 2), budget_s=0, repeats=1,
    attention="sdpa", sustained_s=0.01,
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("coarse_grid", "designed_points"):
        all_points = getattr(measure, name)

        def some(op: str, limits: Limits, points: Any = all_points) -> list[Any]:
            found = points(op, limits)
            return sorted({found[0], found[len(found) // 2], found[-1]})

        monkeypatch.setattr(measure, name, some)


def measured(out: Path, lines: list[str] | None = None, **changes: Any) -> Bundle:
    say = (lambda _: None) if lines is None else lines.append
    folder, _ = profile(replace(SETTINGS, out=out, **changes), say, lambda *_: None)
    return load_bundle(folder)


def journal(out: Path) -> str:
    (path,) = out.glob("*/*/.tp1.work/*.jsonl")
    return path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["out of memory", "cublas", "refused"])
@pytest.mark.parametrize("at", [12, 80], ids=["a probe", "a point"])
def test_a_point_that_fails_is_a_row_with_its_reason(tmp_path: Path, failure: str, at: int) -> None:
    lines: list[str] = []
    with fake_cuda.pretend(fail_at={at: failure}):
        bundle = measured(tmp_path, lines)
    (skipped,) = [line for line in lines if "skipped" in line]
    error = fake_cuda.FAILURES[failure]
    assert f"{type(error).__name__}: {str(error)[:40]}" in skipped
    assert bundle.meta.environment["skipped_points"] == 1
    assert "1 points without a time" in bundle.meta.notes


@pytest.mark.slow
@pytest.mark.parametrize("at", [12, 80], ids=["a probe", "a point"])
def test_after_a_lost_gpu_the_same_command_goes_on(tmp_path: Path, at: int) -> None:
    with (
        fake_cuda.pretend(fail_at={at: "sticky"}),
        pytest.raises(ProfileError, match=r"does nothing more .* the same command continues"),
    ):
        measured(tmp_path)
    assert '"lost": true' in journal(tmp_path)
    lines: list[str] = []
    with fake_cuda.pretend():
        measured(tmp_path, lines)
    assert any("resuming" in line for line in lines)
    (skipped,) = [line for line in lines if "skipped" in line]
    assert "an illegal memory access" in skipped


@pytest.mark.slow
def test_a_lost_gpu_while_launches_are_timed_is_not_met_again(tmp_path: Path) -> None:
    """Every overhead is a point of its own."""
    with fake_cuda.pretend() as gpu:
        measured(tmp_path / "whole")
    launches = gpu.log.index("replay")
    for at in (gpu.log[:launches].count("wait") + more for more in (-3, 2)):
        out = tmp_path / str(at)
        with (
            fake_cuda.pretend(fail_at={at: "sticky"}),
            pytest.raises(ProfileError, match="overhead"),
        ):
            measured(out)
        with fake_cuda.pretend():
            assert len(measured(out).overhead) == 3


def test_a_gpu_without_memory_for_the_timer_is_one_line(tmp_path: Path) -> None:
    error = pytest.raises(ProfileError, match=r"^device cuda: OutOfMemoryError: CUDA out of memory")
    with fake_cuda.pretend(fail_at={4: "out of memory"}), error:
        measured(tmp_path)


def test_weights_that_no_longer_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")

    monkeypatch.setattr(shard_ops, "ShardLayer", fail)
    with fake_cuda.pretend(), pytest.raises(ProfileError) as found:
        measured(tmp_path)
    assert str(found.value) == (
        "tp 1: the shard cannot be made: OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "1 GiB."
    )


OTHER_MACHINE = {
    "processor": "another CPU", "system": "Linux 6.99", "python": "3.12.1", "gpus": 8,
    "driver": "999.9",
}  # fmt: skip
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "gpu", "dtype", "resumes"),
    [
        (OTHER_MACHINE, H100, "bfloat16", True),
        ({}, "NVIDIA H200", "bfloat16", False),
        ({"torch": "2.99"}, H100, "bfloat16", False),
        ({}, H100, "float16", False),
    ],
    ids=["machine", "gpu", "torch", "format"],
)
def test_another_machine_with_the_same_gpu_torch_and_format_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: dict[str, Any],
    gpu: str,
    dtype: str,
    resumes: bool,
) -> None:
    with fake_cuda.pretend(fail_at={80: "sticky"}), pytest.raises(ProfileError):
        measured(tmp_path, device_name="gpu")
    facts = environment.facts
    monkeypatch.setattr(environment, "facts", lambda *a: facts(*a) | other)
    lines: list[str] = []
    with fake_cuda.pretend(gpu):
        bundle = measured(tmp_path, lines, device_name="gpu", dtype=dtype)
    assert any("resuming" in line for line in lines) == resumes
    if resumes:
        assert bundle.meta.environment["processor"] == "another CPU"


@pytest.mark.slow
def test_profile_imports_no_simulator() -> None:
    """Neither it nor what a simulation needs: a GPU node has torch, pandas, scipy and typer."""
    code = (
        "import sys\n"
        "from sarathi_sim.experiments.cli import main\n"
        "sys.argv = ['sarathi-sim', 'profile', '--model', 'no-such-model']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "from sarathi_sim.profiler.measuring import measure\n"
        "from sarathi_sim.profiler.measuring import ranks, shard_ops\n"
        "from sarathi_sim.experiments.report.render import ProgressBar, consoles\n"
        "ProgressBar(consoles()[1], enabled=True)\n"
        "print(*sorted({n.removeprefix('sarathi_sim.').split('.')[0] for n in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    needless = {"simulator", "simpy", "bokeh", "matplotlib", "jinja2", "dask", "joblib", "psutil"}
    assert not loaded & needless


@pytest.mark.slow
def test_clock_power_and_throttling_are_those_of_each_point(tmp_path: Path) -> None:
    """Not those of an idle GPU before and after."""
    with fake_cuda.pretend() as gpu:
        gpu.nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda _: 0x4 | 0x1
        bundle = measured(tmp_path)
    for frame in (bundle.linear, bundle.attn_decode, bundle.mixed):
        assert set(frame["power_w"]) == {543.2}
        assert set(frame["sm_clock_mhz"]) == {1000.0}
    known = bundle.meta.environment
    assert known["slowed_points"] == "power cap 100 %"
    assert known["sm_clock_mhz_median"] == 1000.0
    assert known["power_limit_w"] == 700.0
    assert "sustained_slower_pct" not in known  # the pretended calls take no time
    assert (known["flush"], known["event_floor_us"]) == ("read", 50.0)
    assert "sm_clock_mhz_before" not in known
    assert known["others_fused_pct"] == 100.0  # every call takes as long here


@pytest.mark.slow
def test_a_profile_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda.pretend():
        monkeypatch.setitem(sys.modules, "pynvml", None)
        bundle = measured(tmp_path)
    assert "power_w" not in bundle.linear


@pytest.mark.slow
def test_only_some_ops_first_and_the_rest_later(tmp_path: Path) -> None:
    lines: list[str] = []
    with fake_cuda.pretend():
        settings = replace(SETTINGS, out=tmp_path, ops=("preproj", "mixed"))
        assert profile(settings, lines.append, lambda *_: None) == []
        assert lines[-1] == "tp 1: 6 points are kept; continue without ops"
        ops = {line.split('"')[3] for line in journal(tmp_path).splitlines()}
        assert ops == {"preproj", "mixed"}
        bundle = measured(tmp_path, lines)
    assert "tp 1: resuming, 6 points are finished already" in lines
    assert len(bundle.linear) == 6 * 3 + 2
    unknown = pytest.raises(ProfileError, match=r"--set ops=prepro: unknown.*did you mean")
    with fake_cuda.pretend(), unknown:
        measured(tmp_path / "other", ops=("prepro",))


@pytest.mark.slow
def test_seconds_are_a_hard_limit(tmp_path: Path) -> None:
    with fake_cuda.pretend():
        with pytest.raises(ProfileError, match=r"max_seconds are over, \d+ points are finished"):
            measured(tmp_path, max_s=0.0)
        measured(tmp_path)


@pytest.mark.slow
def test_the_announced_time_holds_the_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: every sample takes the flush's 10 s and next to nothing."""
    timer = timing.Timer.__init__

    def slow(self: Any, *args: Any, **more: Any) -> None:
        timer(self, *args, **more)
        self.flush_s = 10.0

    monkeypatch.setattr(timing.Timer, "__init__", slow)
    lines: list[str] = []
    with fake_cuda.pretend():
        measured(tmp_path, lines)
    (announced,) = [line for line in lines if "coarse points" in line]
    points = 8 * 3 + 2 + 2 * 3
    seconds = float(announced.split("take about ")[1].split(" s")[0])
    assert seconds == pytest.approx(points * 3.5 * 10, rel=0.01)


@pytest.mark.parametrize("flush", ["write", "read", "rotate"])
def test_each_way_to_make_the_cache_cold(flush: Any) -> None:
    with fake_cuda.pretend() as gpu:
        timer = timing.Timer(torch.device("cuda"), 1, flush=flush)
        gpu.log.clear()
        with CountedOps() as ops:
            timer(lambda index: gpu.log.append("call"))
    one = ["record", "call", "record", "wait"]
    if flush == "rotate":
        assert gpu.log == 3 * ["sleep", *one]
        assert ops.names == []
    else:
        assert gpu.log == 3 * one
        op = {"write": "aten.zero_.default", "read": "aten.sum.default"}[flush]
        assert ops.names == 3 * 16 * [op]


@pytest.mark.parametrize(
    ("late", "flushes", "preempted"),
    [
        (2, [1, 2, 4, 4, 1], 0),  # in the first call, which a warm-up is
        (1000, [1, 2, 4, 8, 8, 1, 2, 4, 8], 1),
    ],
)
def test_a_gpu_that_waits_for_its_host(late: int, flushes: list[int], preempted: int) -> None:
    """By hand: two warm-ups and a sample. A sample is taken again after a flush twice as long, up
    to eight times; one that waited even so is counted."""
    with fake_cuda.pretend() as gpu:
        timer = timing.Timer(torch.device("cuda"), 1, flush="read")
        gpu.late = late
        with CountedOps() as ops:
            found = timer(lambda index: None)
    assert ops.names == 16 * sum(flushes) * ["aten.sum.default"]
    assert (found.samples, found.preempted) == (1, preempted)


def test_nobody_asks_nvml_while_the_host_is_timed() -> None:
    with fake_cuda.pretend():
        sampler = timing.Sampler()
        timer = timing.Timer(torch.device("cuda"), 1, sampler=sampler)
        running: list[bool] = []
        with sampler:
            timer.launch(lambda index: running.append(sampler._thread is not None))
            assert sampler._thread is not None
        timer.launch(lambda index: None)
        assert sampler._thread is None
    assert running == 4 * 11 * [False]


class CountedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_rotated_weights_are_larger_than_any_cache() -> None:
    """Of 13B's TP 8 the smallest matrix has 640 x 5120 numbers: 6.6 MB, so 41 copies."""
    model = load_model("llama-13b")
    assert shard_ops.weight_copies(model, 8, 2, "cuda", "rotate") == 41
    assert shard_ops.weight_copies(model, 1, 2, "cuda", "rotate") == 6
    assert shard_ops.weight_copies(model, 8, 2, "cuda", "read") == 1


@pytest.mark.slow
def test_fp8_gemms_are_measured_and_held_to_the_peak_of_fp8(tmp_path: Path) -> None:
    with fake_cuda.pretend(), CountedOps() as ops:
        bundle = measured(tmp_path, weights="fp8")
    assert "aten._scaled_mm.default" in ops.names
    assert bundle.meta.environment["weights"] == "fp8"
    assert {row["op"] for row in bundle.linear.to_dict("records")} >= {"preproj", "ffn_ln2"}
    with (
        fake_cuda.pretend("NVIDIA A100-SXM4-80GB", capability=(8, 0)),
        pytest.raises(ProfileError, match="weights fp8: NVIDIA A100-SXM4-80GB has no fp8 units"),
    ):
        measured(tmp_path / "a100", weights="fp8")


@pytest.mark.parametrize(
    ("visible", "handle"),
    [(None, "index 0"), ("3,1", "index 3"), ("GPU-12ab,GPU-34", "uuid GPU-12ab")],
)
def test_nvml_is_asked_about_the_gpu_that_torch_uses(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, handle: str
) -> None:
    asked: list[str] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with fake_cuda.pretend() as gpu:
        gpu.nvml.nvmlDeviceGetTemperature = lambda device, _: asked.append(device) or 41
        Sampler()
    assert asked == [handle]


def test_states_are_those_since_a_moment() -> None:
    """By hand: the median of 700 and 900 MHz, the highest of 60 and 50 C, both reasons."""
    with fake_cuda.pretend() as gpu:
        sampler = Sampler()
        rows = [(300, 90, 0x1), (700, 60, 0x4), (900, 50, 0x20)]
        began = 0.0
        for number, (clock, temperature, bits) in enumerate(rows):
            gpu.nvml.nvmlDeviceGetClockInfo = lambda *_, value=clock: value
            gpu.nvml.nvmlDeviceGetTemperature = lambda *_, value=temperature: value
            gpu.nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda _, value=bits: value
            if number == 1:
                began = time.perf_counter()
            fresh = Sampler()  # which reads the functions as they are now
            fresh.sample()
            sampler._samples += fresh._samples
        found = sampler.since(began)
    assert found == GpuState(800.0, 543.2, 60, "power cap, software thermal slowdown")
    assert sampler.since(time.perf_counter()).clock_mhz == 900  # nothing newer: the last


def test_what_nvml_does_not_tell_is_left_out() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Not Supported")

    with fake_cuda.pretend() as gpu:
        gpu.nvml.nvmlDeviceGetFieldValues = gpu.nvml.nvmlDeviceGetPowerUsage = refuse
        with Sampler() as sampler:
            sampler.sample()
        found = sampler.since(0.0)
    assert (found.power_w, found.clock_mhz) == (0.0, 1000.0)
