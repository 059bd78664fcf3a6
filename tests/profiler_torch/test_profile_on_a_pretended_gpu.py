"""``profile`` on a pretended GPU (fake_cuda.py): it ends, whatever fails, and goes on elsewhere."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from profiler.bundle.schema import Bundle, load_bundle  # noqa: E402
from profiler.facts.model import load_model  # noqa: E402
from profiler.measuring import degree  # noqa: E402
from profiler.measuring.measure import profile  # noqa: E402
from profiler.planning.profile_error import ProfileError  # noqa: E402
from profiler.planning.settings import Limits, Settings  # noqa: E402
from profiler.shard import environment  # noqa: E402
from tests.patience import PATIENCE_S  # noqa: E402
from tests.profiler_torch import fake_cuda  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TINY = replace(load_model("tiny-llama-40m"), hidden_size=256, num_heads=4, num_kv_heads=2,
               head_dim=64, ffn_hidden_size=512, vocab_size=512, num_layers=2)  # fmt: skip
SETTINGS = Settings(
    TINY, (1,), "cuda", "bfloat16", Path(), Limits(16, 32, 2), budget_s=0, repeats=1,
    attention="sdpa",
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest, a medium and the largest point of every op."""
    for name in ("coarse_grid", "designed_points"):
        all_points = getattr(degree, name)

        def some(op: str, limits: Limits, points: Any = all_points) -> list[Any]:
            found = points(op, limits)
            return [found[0], found[len(found) // 2], found[-1]]

        monkeypatch.setattr(degree, name, some)


def measured(out: Path, lines: list[str] | None = None, **changes: Any) -> Bundle:
    """Profile on the GPU pretended at the time."""
    say = (lambda _: None) if lines is None else lines.append
    folder, _ = profile(replace(SETTINGS, out=out, **changes), say, lambda *_: None)
    return load_bundle(folder)


def journal(out: Path) -> str:
    (path,) = out.glob("*/*/.tp1.work/*.jsonl")
    return path.read_text()


@pytest.mark.parametrize("failure", ["out of memory", "cublas", "refused"])
@pytest.mark.parametrize("at", [4, 60], ids=["a probe", "a point"])
def test_a_point_that_fails_is_a_row_with_its_reason(tmp_path: Path, failure: str, at: int) -> None:
    lines: list[str] = []
    with fake_cuda.pretend(fail_at={at: failure}):
        bundle = measured(tmp_path, lines)
    (skipped,) = [line for line in lines if "skipped" in line]
    error = fake_cuda.FAILURES[failure]
    assert f"{type(error).__name__}: {str(error)[:40]}" in skipped
    assert bundle.meta.environment["skipped_points"] == 1
    assert "1 points without a time" in bundle.meta.notes


@pytest.mark.parametrize("at", [4, 60], ids=["a probe", "a point"])
def test_after_a_lost_gpu_the_same_command_goes_on(tmp_path: Path, at: int) -> None:
    with (
        fake_cuda.pretend(fail_at={at: "sticky"}),
        pytest.raises(ProfileError, match=r"does nothing more .* the same command goes on"),
    ):
        measured(tmp_path)
    assert '"lost": true' in journal(tmp_path)
    lines: list[str] = []
    with fake_cuda.pretend():
        measured(tmp_path, lines)
    assert any("resuming" in line for line in lines)
    (skipped,) = [line for line in lines if "skipped" in line]
    assert "an illegal memory access" in skipped


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


def test_weights_that_no_longer_fit_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from profiler.measuring import shard_ops

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")

    monkeypatch.setattr(shard_ops, "ShardLayer", fail)
    with fake_cuda.pretend(), pytest.raises(ProfileError) as found:
        measured(tmp_path)
    assert str(found.value) == (
        "tp 1: the shard cannot be made: OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "1 GiB."
    )


def test_another_machine_with_the_same_gpu_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cuda.pretend(fail_at={60: "sticky"}), pytest.raises(ProfileError):
        measured(tmp_path)
    other = {
        "processor": "another CPU", "system": "Linux 6.99", "python": "3.12.1", "gpus": 8,
        "driver": "999.9",
    }  # fmt: skip
    facts = environment.facts
    monkeypatch.setattr(environment, "facts", lambda *a: facts(*a) | other)
    lines: list[str] = []
    with fake_cuda.pretend():
        bundle = measured(tmp_path, lines)
    assert any("resuming" in line for line in lines)
    assert bundle.meta.environment["processor"] == "another CPU"


@pytest.mark.parametrize(
    "change", [{"name": "NVIDIA H200"}, {"torch": "2.99"}, {"dtype": "float16"}], ids=str
)
def test_another_gpu_torch_or_format_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    with fake_cuda.pretend(fail_at={60: "sticky"}), pytest.raises(ProfileError):
        measured(tmp_path, device_name="gpu")
    facts = environment.facts
    named = {"torch": change["torch"]} if "torch" in change else {}
    monkeypatch.setattr(environment, "facts", lambda *a: facts(*a) | named)
    lines: list[str] = []
    with fake_cuda.pretend(change.get("name", "NVIDIA H100 80GB HBM3")):
        measured(tmp_path, lines, device_name="gpu", dtype=change.get("dtype", "bfloat16"))
    assert not any("resuming" in line for line in lines)


def test_profile_imports_no_simulator() -> None:
    """Neither it nor what a simulation needs: a GPU node has torch, pandas, scipy and typer."""
    code = (
        "import sys\n"
        "from experiments.cli.app import main\n"
        "sys.argv = ['sarathi-sim', 'profile', '--model', 'no-such-model']\n"
        "from experiments.cli import profile\n"
        "from profiler.measuring import measure\n"
        "from profiler.measuring import ranks, shard_ops, overhead\n"
        "from experiments.cli.common import ProgressBar, consoles\n"
        "ProgressBar(consoles()[1], enabled=True)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    needless = {"simulator", "simpy", "bokeh", "matplotlib", "jinja2", "dask", "joblib", "psutil"}
    assert not loaded & needless
