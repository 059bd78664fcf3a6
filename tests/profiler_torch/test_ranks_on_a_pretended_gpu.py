"""Collectives between GPUs: a sample is many calls in a row, enqueued while the GPU waits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.profiler.measuring import ranks  # noqa: E402
from tests.profiler_torch import fake_cuda  # noqa: E402


def test_a_sample_holds_no_launch() -> None:
    """By hand: the events are 2 ms apart, so each of 20 calls takes 100 us."""
    times: list[float] = []
    with fake_cuda.pretend() as gpu:
        gpu.call_ms = 2.0
        ranks._timed_region(lambda: gpu.log.append("call"), torch.device("cuda"), times)
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
