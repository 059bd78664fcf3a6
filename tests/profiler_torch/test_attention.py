"""Which attention is taken on CUDA: xformers' own Python code and SDPA, on a pretended GPU."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from torch.nn.attention import _cur_sdpa_kernel_backends

from sarathi_sim.profiler.shard import attention as backends
from sarathi_sim.profiler.shard.attention import (
    Chunk,
    Decodes,
    KVCache,
    SdpaAttention,
    XformersAttention,
    choose_attention,
)
from tests.profiler_torch import fake_cuda

CUDA = torch.device("cuda")
GQA = (32, 8, 128)


@pytest.fixture
def gpu() -> Iterator[fake_cuda.Gpu]:
    with fake_cuda.pretend() as found:
        yield found


@pytest.fixture
def fmha(gpu: Any) -> Any:
    """Imported while there is a GPU: what operators it has is settled then."""
    return pytest.importorskip("xformers.ops.fmha", reason="xformers is not installed")


@pytest.mark.parametrize("sizes", [(40, 40, 128), GQA, (4, 1, 64)], ids=str)
def test_xformers_own_code_takes_every_call(fmha: Any, sizes: tuple[int, int, int]) -> None:
    """Its signatures, its checks of shapes and biases, and its choice of an operator."""
    attention, reason = choose_attention(CUDA, torch.bfloat16, *sizes, "xformers")
    assert isinstance(attention, XformersAttention) and reason == ""
    assert attention.kernel in attention.name
    assert attention.name.startswith(f"xformers {metadata.version('xformers')} memory_efficient")


def test_an_operator_that_refuses_leads_to_sdpa(fmha: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "No operator found for `memory_efficient_attention_forward` with inputs:\n"
            "     query       : shape=(1, 16, 4, 8) (torch.float32)\n"
            "`fa2F@0.0` is not supported because:\n"
            "    xFormers wasn't build with CUDA support\n"
        )

    monkeypatch.setattr(fmha.dispatch, "_dispatch_fw", refuse)
    attention, reason = choose_attention(CUDA, torch.bfloat16, *GQA)
    assert isinstance(attention, SdpaAttention)
    assert reason.startswith("xformers failed: NotImplementedError: No operator found for")
    assert "`fa2F@0.0` is not supported because: xFormers wasn't build with CUDA support" in reason
    assert "install nvidia-cuda-runtime-cu12" in reason
    assert "\n" not in reason
    with pytest.raises(ValueError, match=r"^--attention xformers: xformers failed: NotImpl"):
        choose_attention(CUDA, torch.bfloat16, *GQA, "xformers")


def test_the_runtime_is_loaded_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libcudart.so.12"
    files = [SimpleNamespace(name=path.name, locate=lambda path=path: path)
             for path in (tmp_path / "License.txt", library)]  # fmt: skip
    asked: list[str] = []
    monkeypatch.setattr(backends.metadata, "files", lambda name: asked.append(name) or files)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: asked.append(path))
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(ImportError):
        XformersAttention()
    assert asked == ["nvidia-cuda-runtime-cu12", str(library)]


WARNED = (
    "Flash attention kernel not used because:", "Flash Attention does not support non-null mask.",
    "cuDNN attention kernel not used because:", "cuDNN attention has been runtime disabled.",
)  # fmt: skip


class Kernels:
    """Stands for SDPA on a GPU: the fused kernels take what torch documents, and math anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_dim: int = 256) -> None:
        self.taken: list[str] = []
        self.most_dim = most_dim
        self.real = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", self)

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        enabled = [backend.name for backend in _cur_sdpa_kernel_backends()]
        mask, grouped = options.get("attn_mask"), q.shape[1] != k.shape[1]
        plain = isinstance(mask, torch.Tensor) and type(mask).__name__ != "CausalBias"
        for name in enabled:
            fits = {
                "FLASH_ATTENTION": not plain and q.shape[-1] <= self.most_dim,
                "EFFICIENT_ATTENTION": not grouped,
                "CUDNN_ATTENTION": q.shape[-1] <= 128,
                "MATH": True,
            }[name]
            if fits:
                self.taken.append(name)
                return torch.empty_like(q)
        for line in WARNED:
            warnings.warn(f"{line} (Triggered internally at sdp_utils.cpp:986.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("sdpa", "torch SDPA, flash for prefill/chunk/decode, efficient for skewed"),
        ("cudnn", "torch SDPA, cudnn for prefill/chunk/decode/skewed"),
    ],
)
def test_sdpa_says_which_kernels_it_took(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, choice: Any, name: str
) -> None:
    kernels = Kernels(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's reasons are not printed
        attention, reason = choose_attention(CUDA, torch.bfloat16, *GQA, choice)
    assert attention.name == name
    assert reason == f"{choice} was asked for"
    assert "MATH" not in kernels.taken


def test_math_is_refused_at_the_models_shape(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 64 would do: the trial must be with the model's."""
    kernels = Kernels(monkeypatch, most_dim=64)
    why = r"takes this prefill: No available kernel\. Aborting execution\. Flash Attention does not"
    with pytest.raises(ValueError, match=rf"--attention sdpa: .*no fused SDPA kernel {why}"):
        choose_attention(CUDA, torch.bfloat16, 32, 8, 256, "sdpa")
    assert "MATH" not in kernels.taken


def test_flash_attention_3_where_it_is_not_installed_is_one_line(gpu: Any) -> None:
    with pytest.raises(ValueError, match=r"^--attention fa3: fa3 failed: ModuleNotFoundError: .*"):
        choose_attention(CUDA, torch.bfloat16, *GQA, "fa3")


def test_flash_attention_3_is_activated_in_sdpa(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    activated: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    kernels = Kernels(monkeypatch)
    attention, _ = choose_attention(CUDA, torch.bfloat16, *GQA, "fa3")
    assert activated == ["FA3"]
    assert attention.name == "torch SDPA, FA3, flash for prefill/chunk/decode, efficient for skewed"
    assert kernels.taken.count("EFFICIENT_ATTENTION") == 1


@pytest.mark.parametrize("choice", ["xformers", "cudnn", "fa3"])
def test_on_a_cpu_there_is_sdpa_only(choice: Any) -> None:
    with pytest.raises(ValueError, match=f"--attention {choice}: needs CUDA"):
        choose_attention(torch.device("cpu"), torch.float32, 4, 2, 8, choice)


# What we ask of xformers' biases, by a stand-in that computes with them: it agrees with SDPA


CPU = torch.device("cpu")


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
    fmha = SimpleNamespace(
        attn_bias=biases,
        memory_efficient_attention_forward=attend,
        Inputs=lambda **inputs: SimpleNamespace(normalize_bmhk=lambda: None),
        dispatch=SimpleNamespace(_dispatch_fw=lambda inp, grad: SimpleNamespace(NAME="stand-in")),
    )
    package, ops = ModuleType("xformers"), ModuleType("xformers.ops")
    package.__version__, ops.fmha = "0.0", fmha  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    return fmha


def new(tokens: int, kv_heads: int) -> list[torch.Tensor]:
    return [torch.randn(tokens, n, 8) for n in (4, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_xformers_and_sdpa_agree(xformers: Any, kv_heads: int) -> None:
    cache = KVCache(200, kv_heads, 8, CPU, torch.float32)
    both = (XformersAttention(), SdpaAttention(CPU, torch.float32))
    chunk, batch = new(7, kv_heads), new(3, kv_heads)
    for context in (0, 5):
        outs = [Chunk(a, 7, context, 3).run(cache, *chunk) for a in both]
        assert torch.allclose(*outs, atol=1e-6)
    for contexts, first in (([6] * 3, 20), ([9, 4, 0], 60)):
        outs = [Decodes.in_a_row(a, contexts, CPU, first).run(cache, *batch) for a in both]
        assert torch.allclose(*outs, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_decodes_in_any_blocks_agree(xformers: Any, kv_heads: int) -> None:
    """The engine's decodes: blocks out of order, lengths so different that SDPA needs two calls."""
    batch, decodes = new(3, kv_heads), [(2, 9), (0, 4), (3, 0)]
    outs, caches = [], []
    for attention in (XformersAttention(), SdpaAttention(CPU, torch.float32)):
        torch.manual_seed(0)
        caches.append(KVCache(4 * 12, kv_heads, 8, CPU, torch.float32))
        plan = Decodes.in_blocks(attention, decodes, 4, 12, CPU)
        outs.append(plan.run(caches[-1], *batch))
    assert torch.allclose(*outs, atol=1e-6)
    assert torch.equal(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].k[2 * 12 + 9], batch[1][0])
