"""The attention backends: torch's SDPA with a fused kernel of choice, and xformers. Imports torch.

Both have the same methods. q is (tokens, heads, dim), the new tokens' keys and values included in
those that they see.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: The fused kernels of torch's SDPA that each choice may take, best first. The math kernel is none:
#: it writes the scores to memory, which no engine does.
_FUSED = {
    "sdpa": ("FLASH_ATTENTION", "EFFICIENT_ATTENTION"),
    "cudnn": ("CUDNN_ATTENTION",),
    "fa3": ("FLASH_ATTENTION",),
}
_KERNELS = {
    "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient", "CUDNN_ATTENTION": "cudnn",
}  # fmt: skip


class SdpaAttention:
    """torch.nn.functional.scaled_dot_product_attention, on CUDA by the fused kernels of ``choice``.

    The first call of each kind finds the kernel that takes it, for good; it raises RuntimeError
    where none does. ``kernel`` is the last call's ("" on a CPU). With "fa3", torch's flash kernel
    is FlashAttention 3. Raises ImportError or RuntimeError where that is not installed.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, choice: str = "sdpa") -> None:
        self._device, self._dtype = device, dtype
        self._fused = _FUSED[choice] if device.type == "cuda" else ()
        self._chosen: dict[str, str] = {}
        # Made where it is needed, torch's lower-right bias costs nothing; cuDNN needs a mask.
        self._lower_right = bool(self._fused) and choice != "cudnn"
        self.library = "torch SDPA" if self._fused else "torch SDPA, mask"
        if choice == "fa3":
            self.library += ", FA3"
        self.kernel: str | None = ""
        self._choice = choice
        if choice == "fa3":
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")

    @property
    def name(self) -> str:
        """With the kernels that took each kind of call so far."""
        kinds: dict[str, list[str]] = {}
        for kind, backend in self._chosen.items():
            kinds.setdefault(_KERNELS[backend], []).append(kind)
        return ", ".join([self.library, *(f"{k} for {'/'.join(v)}" for k, v in kinds.items())])

    def prefill_bias(self, chunk: int, context: int) -> Any:
        """None (causal), torch's lower-right causal bias, or an additive mask (chunk, total)."""
        if context == 0:
            return None
        if self._lower_right:
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(chunk, context + chunk)
        mask = torch.zeros(chunk, context + chunk, device=self._device, dtype=self._dtype)
        hidden = torch.ones_like(mask, dtype=torch.bool).triu(context + 1)
        return mask.masked_fill_(hidden, float("-inf"))

    def decode_bias(self, batch: int, context: int, stride: int) -> Any:
        """None: all sequences are equally long."""
        return None

    def skewed_bias(self, contexts: Sequence[int], stride: int) -> Any:
        """An additive mask (batch, 1, 1, longest): shorter sequences are padded to the longest."""
        tokens = torch.tensor(contexts, device=self._device)[:, None] + 1
        positions = torch.arange(max(contexts) + 1, device=self._device)
        mask = torch.zeros(len(contexts), len(positions), device=self._device, dtype=self._dtype)
        return mask.masked_fill_(positions >= tokens, float("-inf"))[:, None, None]

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        """One sequence; see :class:`Attention`."""
        out = self._attend(
            "prefill" if bias is None else "chunk",
            q.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=bias,
            is_causal=bias is None,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        return out[0].transpose(0, 1)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, length: int, bias: Any) -> Tensor:
        """The query heads that share a KV head are the rows of one small matrix."""
        batch, heads, dim = q.shape
        kv_heads = keys.shape[2]
        out = self._attend(
            "decode" if bias is None else "skewed",
            q.view(batch, kv_heads, heads // kv_heads, dim),
            keys[:, :length].transpose(1, 2),
            values[:, :length].transpose(1, 2),
            attn_mask=bias,
        )
        return out.reshape(batch, heads, dim)

    def _attend(self, kind: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if not self._fused:
            return F.scaled_dot_product_attention(q, k, v, **options)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        allowed: Sequence[str] = self._fused
        if kind == "skewed" and self._choice == "fa3":  # flash kernels take no mask
            allowed = ("EFFICIENT_ATTENTION",)
        if kind in self._chosen:
            allowed = [self._chosen[kind]]
        refused = ""
        for backend in allowed:
            try:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    out = F.scaled_dot_product_attention(q, k, v, **options)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                refused = str(error)
            else:
                self._chosen[kind] = backend
                self.kernel = _KERNELS[backend]
                return out
        raise RuntimeError(f"no fused SDPA kernel takes this {kind}: {refused}")


def load_cuda_12_runtime() -> None:
    """Load libcudart.so.12, if the package nvidia-cuda-runtime-cu12 is there.

    xformers' extension needs it, and torch from 2.11 on brings that of CUDA 13 only.
    """
    try:
        files = metadata.files("nvidia-cuda-runtime-cu12") or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name.startswith("libcudart.so."):
            ctypes.CDLL(str(file.locate()))


class XformersAttention:
    """xformers.ops.memory_efficient_attention. Raises ImportError where xformers is missing.

    It picks an operator by shape and bias: ``kernel`` is the last one that a call found out, as it
    does where ``kernel`` is None.
    """

    def __init__(self) -> None:
        load_cuda_12_runtime()
        import xformers
        from xformers.ops import fmha

        self._fmha = fmha
        self.library = f"xformers {xformers.__version__}"
        self._seen: list[str] = []
        self.kernel: str | None = None

    @property
    def name(self) -> str:
        """With the operators found out so far."""
        return ", ".join([f"{self.library} memory_efficient_attention", *self._seen])

    def prefill_bias(self, chunk: int, context: int) -> Any:
        """Causal, aligned to the last token."""
        return self._fmha.attn_bias.LowerTriangularFromBottomRightMask()

    def decode_bias(self, batch: int, context: int, stride: int) -> Any:
        """One query a sequence, on padded caches of ``stride`` slots, ``context`` + 1 in use."""
        return self.skewed_bias([context] * batch, stride)

    def skewed_bias(self, contexts: Sequence[int], stride: int) -> Any:
        """One query a sequence, on padded caches of ``stride`` slots; nothing is padded in it."""
        mask = self._fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask
        return mask.from_seqlens(
            q_seqlen=[1] * len(contexts),
            kv_padding=stride,
            kv_seqlen=[context + 1 for context in contexts],
        )

    def gappy_bias(self, starts: Sequence[int], contexts: Sequence[int], end: int) -> Any:
        """One query a sequence; sequences lie anywhere in one cache of ``end`` slots, ascending."""
        mask = self._fmha.attn_bias.BlockDiagonalCausalWithOffsetGappyKeysMask
        return mask.from_seqlens(
            q_seqlen=[1] * len(contexts),
            kv_seqstarts=[*starts, end],
            kv_seqlen=[context + 1 for context in contexts],
        )

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        """One sequence; see :class:`Attention`."""
        return self._attend(q, keys, values, bias)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, length: int, bias: Any) -> Tensor:
        """The caches in place, packed along the tokens."""
        return self._attend(q, keys.flatten(0, 1), values.flatten(0, 1), bias)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        tokens, heads, dim = q.shape
        groups = keys.shape[1]
        share = heads // groups
        q, keys, values = q[None], keys[None], values[None]
        if share > 1:  # GQA: (1, tokens, groups, share, dim); K and V are expanded, never copied
            q = q.view(1, tokens, groups, share, dim)
            keys = keys[:, :, :, None].expand(-1, -1, -1, share, -1)
            values = values[:, :, :, None].expand(-1, -1, -1, share, -1)
        if self.kernel is None:
            self.kernel = self._operator(q, keys, values, bias)
        out: Tensor = self._fmha.memory_efficient_attention_forward(q, keys, values, attn_bias=bias)
        return out.reshape(tokens, heads, dim)

    def _operator(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> str:
        """The operator that xformers takes for this call. Raises NotImplementedError for none."""
        asked = self._fmha.Inputs(query=q, key=keys, value=values, attn_bias=bias)
        asked.normalize_bmhk()
        found = str(self._fmha.dispatch._dispatch_fw(asked, False).NAME)
        if found not in self._seen:
            self._seen.append(found)
        return found
