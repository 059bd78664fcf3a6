"""profile -> fit -> run, on the CPU, with a small budget; and its refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from sarathi_sim.experiments.cli import app
from sarathi_sim.profiler.bundle.schema import bundle_path, load_bundle
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.measuring.measure import message_sizes, read_inter_node, time_collectives
from sarathi_sim.profiler.planning.grid import ProfileError, Timing
from tests.patience import PATIENCE_S
from tests.sampled import profile_folder

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    word
    for value in ("max_tokens=64", "max_context=96", "max_batch=4", "repeats=1")
    for word in ("--set", value)
]
CONFIG = {
    "name": "tiny",
    "model": "tiny-llama-40m",
    "device": "a6000",
    "workload": {"requests": 20, "lengths": {"kind": "fixed", "total": 64}, "pd_ratio": 3},
    "cluster": {"max_length": 64, "tp": 2, "pp": 1},
    "batching": {"max_batch": 4},
    "policy": {"name": "sarathi", "chunk_size": 32, "tile": 32},
    "scenarios": {"sarathi": {}},
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sarathi_sim", *arguments]


def sarathi_sim(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        # readline, which torch imports, sets COLUMNS beside Python's own view of the environment.
        env=dict(os.environ),
    )


def profile(out: Path, *more: str) -> tuple[str, ...]:
    base = ("profile", "--model", "tiny-llama-40m", "--device", "cpu", "--out", str(out), *TINY)
    return (*base, *more)


@pytest.mark.slow
def test_profile_fit_run(tmp_path: Path) -> None:
    """The whole road, from a profile on the CPU to the CDFs of a sweep, sends between nodes
    included: two processes of torchrun stand for those."""
    profiles, sends = tmp_path / "profiles", tmp_path / "inter_node.jsonl"
    between = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "sarathi_sim.profiler.measuring.ranks", "--backend", "gloo", "--dtype", "float32",
         "--send-recv", "1024", "65536", "--repeats", "3", "--out", str(sends)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
        env=dict(os.environ, GLOO_SOCKET_IFNAME="lo"),
    )  # fmt: skip
    assert between.returncode == 0, between.stderr
    assert list(read_inter_node(sends)) == [1024, 65536]
    options = ("--budget", "0.3", "--tp", "1", "2", "--set", f"inter_node={sends}")
    done = sarathi_sim(*profile(profiles, *options))
    assert done.returncode == 0, done.stderr
    assert "coarse points and" in done.stderr
    assert "of mixed or skewed batches take about" in done.stderr
    assert "adaptive points" in done.stderr
    assert "us, of which" in done.stderr  # dispatch
    for tp in (1, 2):
        bundle = load_bundle(bundle_path(profiles, "cpu", "tiny-llama-40m", tp))
        assert bundle.meta.source == "measured"
        assert bundle.meta.dtype == "float32"
        assert bundle.meta.environment["attention"] == "torch SDPA, mask"
        assert bundle.meta.environment["threads"] == 1
        assert bundle.meta.environment["points_mixed"] == len(bundle.mixed) > 0
        assert (len(bundle.all_reduce) > 0) == (tp > 1)
        assert set(bundle.send_recv["scope"]) == {"intra_node", "inter_node"}
        assert len(bundle.attn_decode_skew) > 0
        for name, frame in bundle.tables().items():
            assert "spread_pct" in frame or frame.empty, name
            if name in ("attn_prefill", "attn_decode", "attn_decode_skew", "mixed"):
                assert set(frame["backend"]) == {"torch SDPA, mask"}, name
        assert list(bundle.overhead["what"]) == ["layer_launch", "layer_run"]
        assert not list(profiles.glob("*/*/.tp*"))
    fit = sarathi_sim("fit", str(bundle_path(profiles, "cpu", "tiny-llama-40m", 2)), "--verbose")
    assert fit.returncode == 0, fit.stderr
    assert "attn_prefill" in fit.stdout and "attn_decode" in fit.stdout
    assert "mixed layer" in fit.stdout and "skewed decodes" in fit.stdout
    device = load_device(profiles / "cpu.yaml")
    assert device.peak_flops > 1e9
    assert device.memory_bandwidth > 1e8
    config, many = tmp_path / "tiny.yaml", tmp_path / "many.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    swept = {"grid": {"policy.chunk_size": [32, 64]}}
    many.write_text(yaml.safe_dump(CONFIG | {"sweep": swept}))
    measured = (
        "--set", f"device={profiles / 'cpu.yaml'}", "--set", f"profiles={profiles}",
    )  # fmt: skip
    run = sarathi_sim("run", str(config), *measured, "--no-figures", "--out", f"{tmp_path}/run")
    assert run.returncode == 0, run.stderr
    assert "makespan" in run.stdout
    folder = tmp_path / "sweep"
    sweep = sarathi_sim("sweep", str(many), *measured, "--workers", "1", "--out", str(folder))
    assert sweep.returncode == 0, sweep.stderr
    assert len(pd.read_parquet(folder / "results.parquet")) == 2
    plot = sarathi_sim("plot", str(folder))
    assert plot.returncode == 0, plot.stderr
    assert (folder / "figures" / "cdf.png").stat().st_size > 10_000


@pytest.mark.slow
def test_killed_and_started_again_it_measures_only_what_is_missing(tmp_path: Path) -> None:
    killed = subprocess.Popen(
        command(*profile(tmp_path, "--budget", "0")),
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    journals: list[Path] = []
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and killed.poll() is None:
        journals = list(tmp_path.glob("cpu/*/.tp1.work/*.jsonl"))
        if journals and journals[0].read_bytes().count(b"\n") >= 40:
            break
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    finished = journals[0].read_bytes().count(b"\n")
    assert finished >= 40
    first = yaml.safe_load(journals[0].read_bytes().splitlines()[0])
    # With borrowed collectives, so that this is tested as well.
    others = profile_folder("a6000", "llama-13b", 1)
    again = sarathi_sim(
        *profile(tmp_path, "--budget", "0", "--set", f"collectives={others.parent}")
    )
    assert again.returncode == 0, again.stderr
    assert f"resuming, {finished} points are finished already" in again.stderr
    bundle = load_bundle(bundle_path(tmp_path, "cpu", "tiny-llama-40m", 1))
    assert bundle.send_recv.equals(load_bundle(others).send_recv)
    assert "those of a6000/llama-13b/tp1 (modelled)" in bundle.meta.notes
    linear = bundle.linear
    kept = linear[(linear["op"] == first["op"]) & (linear["num_tokens"] == first["key"][0])]
    assert kept["time_us"].item() == pytest.approx(first["time_us"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--dtype", "fp16"), "no fast fp16 kernels"),
        (("--tp", "3"), "tp 3 does not divide"),
        (("--attention", "xformers"), "--attention xformers: needs CUDA"),
        (("--set", "device_name=a/b"), "it names a folder"),
        (
            ("--set", f"collectives={profile_folder('a6000', 'llama-13b', 1)}", "--tp", "2"),
            "over 1 ranks, not 2",
        ),
    ],
)
def test_no_measurement_of_that(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    done = CliRunner().invoke(app, profile(tmp_path, *arguments))
    assert done.exit_code == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_options_without_torch_are_finite_numbers(value: str) -> None:
    arguments = ("profile", "--model", "x", "--budget")
    done = CliRunner().invoke(app, [*arguments, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[-1]}'" in done.stderr


def test_cuda_without_cuda(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, ["profile", "--model", "tiny-llama-40m", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "sees no CUDA device" in done.stderr


def test_without_torch_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(app, profile(Path("out")))
    assert done.exit_code == 2 and "pip install 'sarathi-sim[profiler]'" in done.stderr


@pytest.mark.slow
def test_collectives_that_hang_or_fail_leave_nobody_behind(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"rank . of 2 ended with code"):
        list(time_collectives(2, "gloo", "no_such_dtype", [1024], []))
    with pytest.raises(ProfileError, match=r"gave no answer for 0\.3 s"):
        list(time_collectives(2, "gloo", "float32", [], [1024], timeout_s=0.3))


def test_message_sizes_without_torch() -> None:
    sizes = message_sizes(3000)
    assert sizes == [1024, 1536, 2048, 3072]
    assert all(size % 4 == 0 for size in message_sizes(2**30))


def test_inter_node_times_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "inter_node.jsonl"
    line = '{"op": "send_recv", "num_bytes": %s, "time_us": %s, "spread": %s, "samples": 9}'
    good = line % (1024, 12.5, 0.25) + "\n"
    path.write_text(good)
    assert read_inter_node(path) == {1024: Timing(12.5, 0.25, 9)}
    for row in (
        '{"op": "send_recv"}', line % (1024, "NaN", 0), line % (1024, 0, 0), line % (-1, 3, 0),
        line % (1024, 3, "NaN"), line % (1024, 3, -0.1), "\xff", "[]",
    ):  # fmt: skip
        path.write_bytes((good + row + "\n").encode("latin-1"))
        with pytest.raises(ProfileError, match="row 2 is not a line"):
            read_inter_node(path)
