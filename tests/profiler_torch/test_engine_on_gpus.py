"""The engine's path on GPUs without a GPU: what it asks of torch.

That NCCL and CUDA do as documented needs GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sarathi_sim.profiler.engine import rank
from sarathi_sim.profiler.engine.processes import EngineProcesses
from sarathi_sim.profiler.engine.rank import Compute, Stage, Stopwatch, open_compute
from sarathi_sim.profiler.engine.spec import Work
from sarathi_sim.profiler.planning.grid import ProfileError
from sarathi_sim.profiler.shard.layer import RandomWeights
from tests.profiler_torch.test_engine_processes import spec

CPU = torch.device("cpu")


class Event:
    """Stands in for a CUDA event; each record comes twice as long after the one before."""

    step = 1.0
    now = 0.0
    made = 0

    def __init__(self) -> None:
        Event.made += 1

    def record(self, stream: object) -> None:
        assert stream == "the current one"
        Event.now += Event.step
        Event.step *= 2
        self.at = Event.now

    def synchronize(self) -> None:
        assert self.at == Event.now, "the last one recorded is waited for"

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_a_gpus_laps_are_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "cuda_events", lambda: (Event(), Event()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current one")
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(3):
        Event.step = 1.0
        watch.start()
        for name in ("gemm", "attention", "gemm"):
            watch.lap(name)
        assert watch.read() == pytest.approx({"gemm": (2 + 8) * 1e-3, "attention": 4e-3})
    assert Event.made == 4, "events are reused"
    watch.start()
    assert watch.read() == {}


def test_the_hosts_laps_add_up_to_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 1.5, 3.5, 3.75])
    monkeypatch.setattr(rank.time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    for name in ("gemm", "attention", "gemm"):
        watch.lap(name)
    assert watch.read() == {"gemm": 0.75, "attention": 2.0}


class OneDevice(TorchDispatchMode):
    """Refuses an op whose tensors lie on two devices, as CUDA does."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        assert len(devices) < 2 or op is torch.ops.aten._to_copy.default, f"{op}: {devices}"
        return op(*args, **(kwargs or {}))


class NoGenerator:
    """There is none for the meta device."""

    def __init__(self, device: object = None) -> None:
        pass

    def manual_seed(self, seed: int) -> NoGenerator:
        return self


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_all_of_a_stage_is_on_its_device(monkeypatch: pytest.MonkeyPatch, pp: int, tp: int) -> None:
    """On torch's meta device, which has shapes and no numbers."""

    def draw(self: RandomWeights, place: int, part: int, *shape: int, scale: float = 1.0) -> Any:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    monkeypatch.setattr(RandomWeights, "_draw", draw)
    monkeypatch.setattr(torch, "Generator", NoGenerator)
    works = [
        ([(0, 4, 0, 1), (1, 3, 5, 0)], [(2, 7), (3, 60)]),
        ([], [(0, 5)]),
        ([], []),
    ]  # fmt: skip
    reduced: list[str] = []
    reduce = (lambda tensor: reduced.append(tensor.device.type)) if tp > 1 else None
    engine = spec(pp, tp)
    for number in range(engine.ranks):
        shape = engine.stage(number)
        with OneDevice():
            stage = Stage(shape, torch.device("meta"), torch.float16, reduce)
            for chunks, decodes in works:
                rows = sum(chunk[1] for chunk in chunks) + len(decodes)
                work = Work(0, tuple(chunks), tuple(decodes), np.arange(rows, dtype=np.int32))
                x = torch.empty(rows, 64, device="meta", dtype=torch.float16)
                out = stage.run(work, None if shape.is_first else x)
                assert (out.device.type, out.dtype) == ("meta", torch.float16)
                outputs = sum(chunk[3] for chunk in chunks) + len(decodes)
                assert len(out) == (outputs if shape.is_last else rows)
    assert set(reduced) == ({"meta"} if tp > 1 else set())


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs of 5 MB each; the list is of those that were chosen."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(rank, "memory_bytes", lambda device: (5 * 10**6, 5 * 10**6))
    return chosen


def test_every_rank_has_a_gpu_of_its_own(gpus: list[int]) -> None:
    two = spec(2, device="cuda", dtype="float16")
    for number in range(2):
        found = open_compute(two, number)
        assert (found.device, found.dtype) == (torch.device("cuda", number), torch.float16)
        assert found.apart
        assert found.backend == "cpu:gloo,cuda:nccl"
    assert gpus == [0, 1]


def test_gpus_that_are_too_few_or_too_small_are_said(gpus: list[int]) -> None:
    with pytest.raises(
        ProfileError, match="pp 2 times tp 2 needs 4 GPUs, one a rank; torch sees 2"
    ):
        open_compute(spec(2, 2, device="cuda"), 0)
    # Each rank answers for its own GPU: together they would not fit into one.
    large = spec(2, device="cuda", slots=32)
    each = [large.bytes_needed(number) for number in range(2)]
    assert max(each) < 0.9 * 5e6 < sum(each)
    open_compute(large, 1)
    with pytest.raises(ProfileError, match=r"sequences of 96 tokens \(rank 1\), and 0.0 GB are"):
        open_compute(replace(large, slots=64), 1)


def test_what_a_rank_needs_is_counted_by_hand() -> None:
    """hidden 64, 4 heads and 2 KV heads of 16, gated FFN of 128, vocabulary 96, padded to 128
    for the LM head."""
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 256 + 128 * 64
    caches = 2 * 4 * 96 * 32
    drawn, widest = 4 * 64 * 256, 64 + 256
    one = spec(1, max_tokens=10)
    numbers = 4 * (layer + caches) + (96 + 128) * 64 + 10 * widest
    assert one.bytes_needed(0) == 4 * numbers + drawn
    two = spec(2, slots=4, max_tokens=10, dtype="bfloat16")
    messages = 4 * 3 * 10 * 64
    half = 2 * (layer + caches) + messages + 10 * widest
    expected = [2 * (half + 96 * 64) + drawn, 2 * (half + 128 * 64) + drawn]
    assert [two.bytes_needed(number) for number in range(2)] == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waiting_is_for_the_own_stream(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Not for the device: transfers that nobody takes yet would be waited for too."""
    waited: list[Any] = []

    class Stream:
        synchronize: Callable[[], None] = staticmethod(lambda: waited.append("stream"))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for all streams"))
    Compute(torch.device(device), torch.float32, "", apart=True).wait()
    assert waited == ["stream"] * (device == "cuda")


@pytest.mark.slow
def test_a_cuda_engine_without_cuda_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    message = "sees no CUDA device"
    with pytest.raises(ProfileError, match=message), EngineProcesses(spec(1, device="cuda")):
        pass
