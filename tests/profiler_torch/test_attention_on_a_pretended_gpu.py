"""Which attention is taken on CUDA: xformers' own Python code and SDPA, on a pretended GPU."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from torch.nn.attention import _cur_sdpa_kernel_backends

from sarathi_sim.profiler.shard import attention as backends
from sarathi_sim.profiler.shard.attention import SdpaAttention, XformersAttention, choose_attention
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


def test_an_operator_that_refuses_leads_to_sdpa_and_a_line(
    fmha: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_runtime_that_xformers_needs_is_loaded_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_the_math_kernel_is_refused_at_the_models_own_shape(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
