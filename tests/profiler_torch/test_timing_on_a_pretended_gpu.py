"""How a GPU is timed, on a pretended one: clocks, graphs, compilers, fp8, collectives."""

from __future__ import annotations

import gc
import sys
import weakref
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.experiments.lab.engines.first_light import probe
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.measuring import measure, ranks, shard_ops
from sarathi_sim.profiler.measuring.measure import DegreeSession
from sarathi_sim.profiler.measuring.shard_ops import ShardOps
from sarathi_sim.profiler.planning.grid import Journal, Limits, ProfileError, Settings, Timing
from sarathi_sim.profiler.shard import timing
from sarathi_sim.profiler.shard.attention import SdpaAttention
from sarathi_sim.profiler.shard.timing import Timer
from tests.profiler_torch import fake_cuda
from tests.profiler_torch.fake_cuda import no_numbers

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
LIMITS = Limits(16, 32, 2)
TINY = load_model("tiny-llama-40m")


def shard(flush: Any = "read", **more: Any) -> ShardOps:
    timer = Timer(CUDA, 1, flush=flush)
    return ShardOps(TINY, 1, CUDA, BF16, LIMITS, timer, 79e9, SdpaAttention(CUDA, BF16), **more)


def test_a_timer_first_lets_the_clock_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: each look at the clock is 0.1 s after the one before, a round takes three, and the
    first comes 0.1 s after 1 s was set; so the fourth round is the last."""
    with fake_cuda.pretend() as gpu:
        clock = (0.1 * tick for tick in count())
        monkeypatch.setattr(timing, "_WAKING_S", 1.0)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock.__next__))
        Timer(CUDA)
    assert gpu.log.count("wait") == 2 * 4


def test_what_a_graph_reads_is_kept() -> None:
    """Memory that is given away before a replay would hold anything: lengths, say."""
    with fake_cuda.pretend():
        lengths = torch.ones(4, device="cuda")
        known = weakref.ref(lengths)
        replay = shard_ops._captured(lambda lengths=lengths: lengths + 1)  # type: ignore[misc]
        del lengths
        gc.collect()
        assert known() is not None
        replay(0)
        del replay
        gc.collect()
        assert known() is None


def test_fused_others_have_one_set_of_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler makes kernels for each set, and gives up after eight."""
    copies: list[int] = []
    norm = shard_ops.ShardLayer.norm

    def spied(self: Any, layer: Any, x: Any) -> Any:
        copies.append(id(layer.weights))
        return norm(self, layer, x)

    monkeypatch.setattr(shard_ops.ShardLayer, "norm", spied)
    with fake_cuda.pretend():
        ops = shard("rotate")
        assert len(ops.sets) > 2
        ops.measure("others", (4,))
        assert set(copies) >= {id(each) for each in ops.sets[:3]}
        copies.clear()
        ops.fused_others((4,))
    assert set(copies) == {id(ops.sets[0])}


class Session:
    """A degree session whose compiler fails, or takes until the time is over."""

    def __init__(self, folder: Path, failed: bool, max_s: float) -> None:
        self.asked: list[Any] = []
        self.said: list[str] = []
        timing = Timing(None, note="no compiler") if failed else Timing(1.0)

        def fused_others(key: Any) -> Timing:
            self.asked.append(key)
            return timing

        def sustained(key: Any, seconds: float) -> tuple[Timing, Timing]:
            self.asked.append(key)
            return Timing(900.0), Timing(990.0)

        launch = partial(Timing, 600.0)
        ops: Any = SimpleNamespace(
            device=CUDA, fused_others=fused_others, sustained=sustained, launch=lambda key: launch()
        )
        settings = Settings(TINY, (1,), "cuda", "bfloat16", folder, LIMITS)
        self.journal = Journal(folder, {})
        self.session = DegreeSession(
            settings, 1, self.journal, ops, self.said.append, lambda *_: None, 0.0, max_s
        )


def test_a_compiler_that_fails_is_asked_once(tmp_path: Path) -> None:
    one = Session(tmp_path, failed=True, max_s=60)
    one.session.fused()
    one.session.fused()  # after a restart
    assert one.asked == [(1,)]
    assert one.said == 2 * ["tp 1: no others in fused kernels: no compiler"]


def test_nothing_is_compiled_when_the_time_is_over(tmp_path: Path) -> None:
    one = Session(tmp_path, failed=False, max_s=-1)
    one.session.fused()
    one.session.sustained()  # of 20 s
    assert one.asked == [] and len(one.journal) == 0
    assert measure.coarse_grid("others", LIMITS)[::4] != []


def test_the_longest_layer_is_run_without_a_pause(tmp_path: Path) -> None:
    """By hand: 990 us after 900 us are 10 % more."""
    one = Session(tmp_path, failed=False, max_s=60)
    for time_us in (400.0, 900.0, 650.0):
        one.journal.add("mixed", (round(time_us), 0, 0, 0), Timing(time_us))
    one.session.sustained()
    one.session.sustained()  # after a restart
    assert one.asked == [(900, 0, 0, 0)]
    known = one.session.facts({})
    assert known["sustained_slower_pct"] == pytest.approx(10)
    assert (known["sustained_layer_us"], known["sustained_launch_us"]) == (990, 600)


def test_a_layer_that_waits_for_the_host_says_nothing_of_the_gpu(tmp_path: Path) -> None:
    one = Session(tmp_path, failed=False, max_s=60)
    one.journal.add("mixed", (1, 0, 0, 0), Timing(400.0))
    one.session.sustained()
    assert one.asked == []
    assert one.said == [
        "tp 1: no layer was run for 20 s: the longest takes 400 us, and 600 us to launch"
    ]
    assert "sustained_slower_pct" not in one.session.facts({})


def test_fp8_accumulates_as_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = []
    multiply = torch._scaled_mm

    def spied(*args: Any, **more: Any) -> Any:
        fast.append(more["use_fast_accum"])
        return multiply(*args, **more)

    monkeypatch.setattr(torch, "_scaled_mm", spied)
    with fake_cuda.pretend():
        shard(fp8=True).measure("ffn_ln1", (4,))
    assert set(fast) == {True}


def test_the_probe_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    with fake_cuda.pretend(), no_numbers():
        with_nvml = probe(tmp_path, rehearsal=False)
        monkeypatch.setitem(sys.modules, "pynvml", None)
        without = probe(tmp_path, rehearsal=False)
        (tmp_path / "results" / "probe.json").write_text('{"gpu": "NVIDIA H200"}')
        with pytest.raises(ProfileError, match="and the hour began on NVIDIA H200"):
            probe(tmp_path, rehearsal=False)
    assert "; no NVML" not in with_nvml and "; no NVML" in without


def test_a_sample_of_a_collective_holds_no_launch() -> None:
    """By hand: the events are 2 ms apart, so each of 20 calls, enqueued while the GPU waits, takes
    100 us."""
    times: list[float] = []
    with fake_cuda.pretend() as gpu:
        gpu.call_ms = 2.0
        ranks._timed_region(lambda: gpu.log.append("call"), CUDA, times)
    assert gpu.log == ["wait", "sleep", "record", *20 * ["call"], "record", "wait"]
    assert times == [pytest.approx(100e-6)]


def test_an_all_reduce_of_many_repeats_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubled by every call (two ranks of equal numbers), a one would be infinite in fp16."""
    seen: list[float] = []

    def doubled(tensor: Any, op: Any = None) -> None:
        if tensor.dtype == torch.float16:
            tensor.mul_(2)
            seen.append(float(tensor.abs().max()))

    for name, stand_in in {"all_reduce": doubled, "barrier": lambda: None,
                           "get_rank": lambda: 0}.items():  # fmt: skip
        monkeypatch.setattr(ranks.dist, name, stand_in)
    found = ranks._measure("all_reduce", 1024, torch.device("cpu"), "float16", 20)
    assert found["num_bytes"] == 1024
    assert len(seen) >= 25 and max(seen) < float("inf")
