"""The CUDA path without a GPU: stand-ins for xformers, events, graphs and NVML check what we ask.

What a stand-in cannot show, that CUDA answers as documented, needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from profiler.facts.model import load_model  # noqa: E402
from profiler.measuring import overhead  # noqa: E402
from profiler.measuring.measure import _identity  # noqa: E402
from profiler.planning.journal import settings_hash  # noqa: E402
from profiler.planning.settings import Limits, Settings  # noqa: E402
from profiler.shard import attention as attention_module  # noqa: E402
from profiler.shard import environment, timing  # noqa: E402
from profiler.shard.attention import (  # noqa: E402
    KVCache,
    choose_attention,
    decode_step,
    prefill_step,
)
from profiler.shard.attention_backends import SdpaAttention, XformersAttention  # noqa: E402
from profiler.shard.layer import ShardLayer  # noqa: E402
from profiler.shard.ragged import RaggedDecode  # noqa: E402
from profiler.shard.timing import Timer  # noqa: E402

CPU = torch.device("cpu")
CUDA = SimpleNamespace(type="cuda")
TINY = replace(load_model("tiny-llama-40m"), hidden_size=32, num_heads=4, num_kv_heads=2,
               head_dim=8, ffn_hidden_size=32, vocab_size=32)  # fmt: skip


class BottomRight:
    """xformers' causal mask, aligned to the last key."""

    def allowed(self, queries: int, keys: int) -> torch.Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


class PaddedKeys:
    """xformers' mask over packed sequences whose keys are padded to equal lengths."""

    def __init__(self, q_seqlen: list[int], kv_padding: int, kv_seqlen: list[int]) -> None:
        self.queries, self.padding, self.keys = q_seqlen, kv_padding, kv_seqlen

    @classmethod
    def from_seqlens(cls, *, q_seqlen: list[int], kv_padding: int, kv_seqlen: list[int]) -> Any:
        assert len(q_seqlen) == len(kv_seqlen) and max(kv_seqlen) <= kv_padding
        return cls(q_seqlen, kv_padding, kv_seqlen)

    def allowed(self, queries: int, keys: int) -> torch.Tensor:
        assert queries == sum(self.queries) and keys == self.padding * len(self.keys)
        found = torch.zeros(queries, keys, dtype=torch.bool)
        row = 0
        for number, (new, held) in enumerate(zip(self.queries, self.keys, strict=True)):
            block = torch.ones(new, held, dtype=torch.bool).tril(held - new)
            start = number * self.padding
            found[row : row + new, start : start + held] = block
            row += new
        return found


class GappyKeys:
    """xformers' mask over sequences whose keys lie anywhere in one cache, in ascending order."""

    def __init__(self, starts: list[int], lengths: list[int]) -> None:
        self.starts, self.lengths = starts, lengths

    @classmethod
    def from_seqlens(
        cls, *, q_seqlen: list[int], kv_seqstarts: list[int], kv_seqlen: list[int]
    ) -> Any:
        assert set(q_seqlen) == {1}
        assert len(kv_seqstarts) == len(kv_seqlen) + 1 == len(q_seqlen) + 1
        assert kv_seqstarts == sorted(kv_seqstarts)
        return cls(kv_seqstarts, kv_seqlen)

    def allowed(self, queries: int, keys: int) -> torch.Tensor:
        assert queries == len(self.lengths) and keys == self.starts[-1]
        found = torch.zeros(queries, keys, dtype=torch.bool)
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=False)):
            found[row, start : start + length] = True
        return found


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_bias: Any) -> torch.Tensor:
    """What memory_efficient_attention_forward computes; BMHK, or BMGHK with K and V expanded."""
    assert q.shape[0] == 1 and q.dim() in (4, 5) and q.dim() == k.dim() == v.dim()
    if q.dim() == 5:
        assert k.stride(3) == v.stride(3) == 0, "K and V of a group must not be copied"
    heads = [part.flatten(2, -2)[0].transpose(0, 1) for part in (q, k, v)]
    mask = attn_bias.allowed(q.shape[1], k.shape[1])
    scores = heads[0] @ heads[1].transpose(1, 2) / q.shape[-1] ** 0.5
    out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ heads[2]
    return out.transpose(0, 1).reshape(q.shape)


@pytest.fixture
def xformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the parts of xformers that are used."""
    biases = SimpleNamespace(
        LowerTriangularFromBottomRightMask=BottomRight,
        BlockDiagonalCausalWithOffsetPaddedKeysMask=PaddedKeys,
        BlockDiagonalCausalWithOffsetGappyKeysMask=GappyKeys,
    )
    fmha = SimpleNamespace(attn_bias=biases, memory_efficient_attention_forward=attend)
    package, ops = ModuleType("xformers"), ModuleType("xformers.ops")
    package.__version__, ops.fmha = "0.0", fmha  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    return fmha


@pytest.fixture
def cpu_in_place_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors for the GPU are made on the CPU, within attention.py."""
    zeros: Callable[..., Any] = torch.zeros
    proxy = SimpleNamespace(
        empty=torch.empty,
        zeros=lambda *size, device, **more: zeros(*size, **more),
        cuda=SimpleNamespace(synchronize=lambda: None),
    )
    monkeypatch.setattr(attention_module, "torch", proxy)
    monkeypatch.setattr(
        attention_module, "KVCache", lambda *size: KVCache(*size[:3], CPU, torch.float32)
    )


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_xformers_and_sdpa_agree(xformers: Any, kv_heads: int) -> None:
    layer = ShardLayer(replace(TINY, num_kv_heads=kv_heads), 1, CPU, torch.float32)
    cache = KVCache(200, kv_heads, 8, CPU, torch.float32)

    def new(tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(layer.random(tokens, n, 8) for n in (4, kv_heads, kv_heads))

    ours, theirs = XformersAttention(), SdpaAttention(CPU, torch.float32)
    chunk, batch, contexts = new(7), new(3), [9, 4, 0]
    for context in (0, 5):
        outs = [
            prefill_step(a, cache, 3, context, chunk, a.prefill_bias(7, context))
            for a in (ours, theirs)
        ]
        assert torch.allclose(*outs, atol=1e-6)
    outs = [
        decode_step(a, cache, 20, 12, 6, batch, a.decode_bias(3, 6, 12)) for a in (ours, theirs)
    ]
    assert torch.allclose(*outs, atol=1e-6)
    places = torch.tensor(contexts)
    outs = [
        decode_step(a, cache, 60, 10, places, batch, a.skewed_bias(contexts, 10))
        for a in (ours, theirs)
    ]
    assert torch.allclose(*outs, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(
    ("block_size", "tables", "first"),
    [(12, [(2,), (0,), (3,)], 2 * 12 + 9), (4, [(2, 9, 4), (0, 7), (3,)], 4 * 4 + 1)],
    ids=["a block each", "tables"],
)
def test_decodes_in_any_blocks_agree(
    xformers: Any, kv_heads: int, block_size: int, tables: list[tuple[int, ...]], first: int
) -> None:
    """The engine's decodes: blocks out of order, lengths so different that SDPA needs two calls."""
    layer = ShardLayer(replace(TINY, num_kv_heads=kv_heads), 1, CPU, torch.float32)
    new = [layer.random(3, n, 8) for n in (4, kv_heads, kv_heads)]
    decodes = list(zip(tables, (9, 4, 0), strict=True))
    outs, caches = [], []
    for attention in (XformersAttention(), SdpaAttention(CPU, torch.float32)):
        torch.manual_seed(0)
        caches.append(KVCache(4 * 12, kv_heads, 8, CPU, torch.float32))
        ragged = RaggedDecode(attention, 48 // block_size, block_size, CPU)
        plan = ragged.plan(decodes)
        ragged.write(caches[-1], new[1], new[2], plan)
        outs.append(ragged.attend(caches[-1], new[0], plan))
    assert torch.allclose(*outs, atol=1e-6)
    assert torch.equal(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].k[first], new[1][0])


@pytest.mark.usefixtures("cpu_in_place_of_cuda")
def test_xformers_is_chosen_where_its_trial_works(xformers: Any) -> None:
    attention, reason = choose_attention(CUDA, torch.float32, 4, 2, 8)  # type: ignore[arg-type]
    assert isinstance(attention, XformersAttention)
    assert attention.name == "xformers 0.0 memory_efficient_attention"
    assert reason == ""


@pytest.mark.usefixtures("cpu_in_place_of_cuda")
def test_an_operator_that_refuses_leads_to_sdpa_and_a_line(xformers: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "No operator found for `memory_efficient_attention_forward` with inputs:\n"
            "     query       : shape=(1, 16, 4, 8) (torch.float32)\n"
            "`fa2F@0.0` is not supported because:\n"
            "    xFormers wasn't build with CUDA support\n"
            "    dtype=torch.float32 (supported: {torch.float16})\n"
        )

    xformers.memory_efficient_attention_forward = refuse
    attention, reason = choose_attention(CUDA, torch.float32, 4, 2, 8)  # type: ignore[arg-type]
    assert isinstance(attention, SdpaAttention)
    assert reason.startswith("xformers failed: NotImplementedError: No operator found for")
    assert "`fa2F@0.0` is not supported because: xFormers wasn't build with CUDA support" in reason
    assert "libcudart" in reason
    assert "\n" not in reason


BIASES = {BottomRight: "prefill", PaddedKeys: "padded decode", GappyKeys: "the engine's decode"}


@pytest.mark.usefixtures("cpu_in_place_of_cuda")
@pytest.mark.parametrize("refused", BIASES, ids=BIASES.values())
def test_an_operator_that_refuses_one_bias_is_found_out_beforehand(
    xformers: Any, refused: type
) -> None:
    """As cutlass does with gappy keys, which leaves float32 without any operator for them."""

    def some(q: Any, k: Any, v: Any, attn_bias: Any) -> torch.Tensor:
        if isinstance(attn_bias, refused):
            raise NotImplementedError("attn_bias type is not supported")
        return attend(q, k, v, attn_bias)

    xformers.memory_efficient_attention_forward = some
    attention, reason = choose_attention(CUDA, torch.float32, 4, 2, 8)  # type: ignore[arg-type]
    assert isinstance(attention, SdpaAttention)
    assert reason == "xformers failed: NotImplementedError: attn_bias type is not supported"
    with pytest.raises(ValueError, match=f"^--attention xformers: {reason}$"):
        choose_attention(CUDA, torch.float32, 4, 2, 8, "xformers")  # type: ignore[arg-type]


@pytest.mark.usefixtures("cpu_in_place_of_cuda", "xformers")
def test_the_backend_that_is_asked_for_is_taken() -> None:
    forced, reason = choose_attention(CUDA, torch.float32, 4, 2, 8, "xformers")  # type: ignore[arg-type]
    assert isinstance(forced, XformersAttention) and reason == ""
    forced, reason = choose_attention(CUDA, torch.float32, 4, 2, 8, "sdpa")  # type: ignore[arg-type]
    assert isinstance(forced, SdpaAttention) and reason == "torch SDPA was asked for"
    with pytest.raises(ValueError, match="xformers' attention needs CUDA"):
        choose_attention(CPU, torch.float32, 4, 2, 8, "xformers")


def test_points_of_another_backend_are_not_mixed_in() -> None:
    settings = Settings(TINY, (1,), "cpu", "float32", Path(), Limits(64, 96, 4))
    by_backend = {settings_hash(_identity(settings, 1, {}, name)) for name in ("sdpa", "xformers")}
    assert len(by_backend) == 2


@pytest.mark.usefixtures("cpu_in_place_of_cuda")
def test_a_missing_library_leads_to_sdpa_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(attention_module.XformersAttention, "__init__", fail)
    attention, reason = choose_attention(CUDA, torch.float32, 4, 2, 8)  # type: ignore[arg-type]
    assert isinstance(attention, SdpaAttention)
    assert reason.startswith("xformers failed: OSError: libcudart.so.12: cannot open")


def test_a_gpu_sample_is_the_events_time_after_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    times_ms = iter([9.0, 5.0, 5.1, 4.0, 6.0, 5.0])

    class Event:
        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, end: Event) -> float:
            return next(times_ms)

    class Flush:
        def zero_(self) -> None:
            log.append("flush")

    timer = Timer(CPU, repeats=3, patience_s=0.0)
    timer._flush = Flush()  # type: ignore[assignment]
    monkeypatch.setattr(timing, "cuda_events", lambda: (Event(), Event()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("wait"))
    result = timer(lambda index: log.append(f"call {index}"))
    assert result.time_us == pytest.approx(5000.0)  # of 4, 6 and 5; the others were warm-ups
    assert result.samples == 3
    one = ["flush"] * timing._FLUSHES + ["record", "call 0", "record", "wait"]
    assert log[: len(one)] == one


class Graphs:
    """Stand-ins for streams and graphs; ``log`` is what was asked of them, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.log: list[str] = []
        self.fails = fails
        stream = SimpleNamespace(wait_stream=lambda other: self.log.append(f"wait {other.name}"))
        main = SimpleNamespace(name="main", wait_stream=stream.wait_stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
        monkeypatch.setattr(
            torch.cuda, "Stream", lambda: SimpleNamespace(name="aside", **vars(stream))
        )
        monkeypatch.setattr(torch.cuda, "stream", lambda s: self._within(f"on {s.name}"))
        monkeypatch.setattr(
            torch.cuda,
            "CUDAGraph",
            lambda: SimpleNamespace(replay=lambda: self.log.append("replay")),
        )
        monkeypatch.setattr(torch.cuda, "graph", lambda _: self._within("capture", self.fails))

    @contextmanager
    def _within(self, what: str, fails: bool = False) -> Iterator[None]:
        self.log.append(what)
        yield
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.log.append(f"end of {what}")


def gpu_ops() -> Any:
    layer = ShardLayer(TINY, 1, CPU, torch.float32)
    return SimpleNamespace(
        model=TINY, layer=layer, device=CUDA, dtype=torch.float32, timer=Timer(CPU, 2),
        attention=SdpaAttention(CPU, torch.float32),
        cache=KVCache(64, layer.kv_heads, TINY.head_dim, CPU, torch.float32),
    )  # fmt: skip


def test_a_graph_is_captured_after_warming_up_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    times = overhead.time_overhead(gpu_ops())
    assert set(times) == {"layer_run", "layer_launch", "layer_graph_launch"}
    assert all(found.time_us is not None for found in times.values())
    before = ["wait main", "on aside", "end of on aside", "wait aside"]
    assert graphs.log[:6] == [*before, "capture", "end of capture"]
    assert set(graphs.log[6:]) == {"replay"}
    assert times["layer_graph_launch"].samples == 20


def test_what_cannot_be_captured_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Graphs(monkeypatch, fails=True)
    found = overhead.time_overhead(gpu_ops())["layer_graph_launch"]
    assert found.time_us is None
    assert found.note == "no CUDA graph: operation not permitted when stream is capturing"


def nvml(power: Callable[[Any], int]) -> ModuleType:
    module = ModuleType("pynvml")
    module.__dict__.update(
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByIndex=lambda index: f"index {index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: f"uuid {uuid}",
        nvmlDeviceGetClockInfo=lambda gpu, kind: 1000 * kind,
        nvmlDeviceGetTemperature=lambda gpu, kind: 41,
        nvmlDeviceGetPowerUsage=power,
    )  # fmt: skip
    return module


@pytest.mark.parametrize(
    ("visible", "handle"),
    [(None, "index 0"), ("3,1", "index 3"), ("GPU-12ab,GPU-34", "uuid GPU-12ab")],
)
def test_nvml_is_asked_about_the_gpu_that_torch_uses(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, handle: str
) -> None:
    asked: list[str] = []

    def power(gpu: str) -> int:
        asked.append(gpu)
        return 345_678

    monkeypatch.setitem(sys.modules, "pynvml", nvml(power))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.gpu_state("before") == {
        "driver": "580.1",
        "sm_clock_mhz_before": 1000,
        "memory_clock_mhz_before": 2000,
        "temperature_c_before": 41,
        "power_w_before": 345.7,
    }
    assert asked == [handle]


def test_what_nvml_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def power(gpu: str) -> int:
        raise RuntimeError("Not Supported")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(power))
    known = environment.gpu_state("after")
    assert "power_w_after" not in known
    assert known["temperature_c_after"] == 41
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert environment.gpu_state("after") == {}
