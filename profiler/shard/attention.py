"""Attention on a pre-allocated KV cache, through xformers or torch's SDPA. Imports torch.

Both backends have the same methods. q is (tokens, heads, dim); the keys and values include those of
the new tokens. xformers is used on CUDA if trial calls work; the reason for falling back is kept,
for the bundle's meta.

:class:`Rows` of an iteration are made once for all layers. Attention is a call for each chunk.
Decodes of similar length are one call: their K and V are gathered, padded to the longest and
masked. With xformers, or if they lie in a row, they are read where they are.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..planning.grid import AttentionChoice

#: A sequence joins a call if it is at least this share as long as the longest one in it: at most a
#: fifth of what is read is padding.
_ALIKE = 0.8

Decode = tuple[int, int]
"""The block of a sequence, and how many tokens it has cached."""
Routing = tuple[Tensor, Tensor]
"""The numbers of each token's experts, (tokens, top_k), and the weights of their outputs."""


class Chunk:
    """``tokens`` of a prompt after ``context`` cached ones; its first token is at ``first``."""

    def __init__(self, attention: Attention, tokens: int, context: int, first: int = 0) -> None:
        self.tokens = tokens
        self._attention, self._context, self._first = attention, context, first
        self._bias = attention.prefill_bias(tokens, context)

    def run(self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v (tokens, kv_heads, dim) and attend; like q (tokens, heads, dim)."""
        first, new = self._first, self._first + self._context
        end = new + self.tokens
        cache.k[new:end] = k
        cache.v[new:end] = v
        return self._attention.prefill(
            q,
            cache.k[first:end],
            cache.v[first:end],
            self._bias,
        )


@dataclass(frozen=True)
class _Call:
    """One call: which rows of the decodes, where their K and V are, the longest length, the mask.
    ``rows`` is None where it is all of them, in order. ``held`` is the block of each, the run of
    slots of all of them, or None for the whole cache."""

    rows: Tensor | None
    held: Tensor | slice | None
    longest: int
    bias: Any


class Decodes:
    """One new token for each of several sequences; ``at`` are their places in a flat cache."""

    def __init__(
        self, attention: Attention, at: Tensor, calls: list[_Call], block_size: int
    ) -> None:
        self._attention, self._at, self._calls = attention, at, calls
        self._block_size = block_size

    @staticmethod
    def in_a_row(
        attention: Attention, contexts: Sequence[int], device: torch.device, first: int = 0
    ) -> Decodes:
        """Sequences of so many cached tokens, with slots for the longest each, from ``first`` on:
        as a kernel likes them best."""
        batch, stride = len(contexts), max(contexts) + 1
        if len(set(contexts)) == 1:
            bias = attention.decode_bias(batch, contexts[0], stride)
        else:
            bias = attention.skewed_bias(contexts, stride)
        at = [first + row * stride + context for row, context in enumerate(contexts)]
        held = slice(first, first + batch * stride)
        calls = [_Call(None, held, stride, bias)]
        return Decodes(attention, torch.tensor(at).to(device), calls, stride)

    @staticmethod
    def in_blocks(
        attention: Attention, decodes: Sequence[Decode], blocks: int, block_size: int,
        device: torch.device,
    ) -> Decodes:  # fmt: skip
        """Sequences that have one each of a cache's ``blocks`` of ``block_size`` tokens."""
        at = torch.tensor([block * block_size + n for block, n in decodes]).to(device)

        def padded(rows: list[int] | None, some: Sequence[Decode]) -> _Call:
            contexts = [context for _, context in some]
            longest = max(contexts) + 1
            bias = attention.skewed_bias(contexts, longest)
            where = None if rows is None else torch.tensor(rows).to(device)
            return _Call(
                where,
                torch.tensor([b for b, _ in some]).to(device),
                longest,
                bias,
            )

        if isinstance(attention, XformersAttention):
            order = sorted(range(len(decodes)), key=lambda row: decodes[row])
            starts = [decodes[row][0] * block_size for row in order]
            contexts = [decodes[row][1] for row in order]
            bias = attention.gappy_bias(starts, contexts, blocks * block_size)
            calls = [_Call(torch.tensor(order).to(device), None, 0, bias)]
            return Decodes(attention, at, calls, block_size)
        alike: list[list[int]] = []
        for row in sorted(range(len(decodes)), key=lambda row: -decodes[row][1]):
            if alike and decodes[row][1] + 1 >= _ALIKE * (decodes[alike[-1][0]][1] + 1):
                alike[-1].append(row)
            else:
                alike.append([row])
        if len(alike) == 1:
            return Decodes(attention, at, [padded(None, decodes)], block_size)
        calls = [padded(rows, [decodes[row] for row in rows]) for rows in alike]
        return Decodes(attention, at, calls, block_size)

    def run(self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v (batch, kv_heads, dim) and attend; like q (batch, heads, dim)."""
        cache.k.index_copy_(0, self._at, k)
        cache.v.index_copy_(0, self._at, v)
        if self._calls[0].rows is None:
            return self._attend(cache, q, self._calls[0])
        out = torch.empty_like(q)
        for call in self._calls:
            assert call.rows is not None
            out.index_copy_(
                0,
                call.rows,
                self._attend(cache, q.index_select(0, call.rows), call),
            )
        return out

    def _attend(self, cache: KVCache, q: Tensor, call: _Call) -> Tensor:
        if call.held is None:
            return self._attention.prefill(q, cache.k, cache.v, call.bias)
        keys, values = (self._held(flat, call) for flat in (cache.k, cache.v))
        return self._attention.decode(q, keys, values, call.longest, call.bias)

    def _held(self, flat: Tensor, call: _Call) -> Tensor:
        """(batch, at least longest, kv_heads, dim)."""
        if isinstance(call.held, slice):
            return flat[call.held].view(
                -1,
                self._block_size,
                *flat.shape[1:],
            )
        assert call.held is not None
        blocks = flat.view(-1, self._block_size, *flat.shape[1:])[:, : call.longest]
        return blocks.index_select(0, call.held)


@dataclass(frozen=True)
class Rows:
    """What all layers share: of the chunks' tokens, then of one for each decode.

    ``angles``   of the rows' ``positions``, by :meth:`ShardLayer.angles`
    ``tokens``   the ids of all rows, where they are embedded
    ``outputs``  the rows that yield a token, where there is an LM head
    ``routing``  the experts of every row, in a mixture
    """

    angles: tuple[Tensor, Tensor]
    chunks: Sequence[Chunk] = ()
    decodes: Decodes | None = None
    positions: Tensor | None = None
    tokens: Tensor | None = None
    outputs: Tensor | None = None
    routing: Routing | None = None


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


@contextmanager
def sdpa_reasons() -> Iterator[list[str]]:
    """Why SDPA takes no kernel inside: torch warns of it, in many lines, and raises an error that
    does not say it. The list is filled at the end; other kernels, switched off, are no reason."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield found
        finally:
            for each in caught:
                text = str(each.message).split(" (Triggered internally")[0].strip()
                if not text.endswith(("because:", "runtime disabled.")) and text not in found:
                    found.append(text)


def _no_reasons() -> AbstractContextManager[list[str]]:
    return nullcontext([])


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
        mask = torch.zeros(
            len(contexts),
            len(positions),
            device=self._device,
            dtype=self._dtype,
        )
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
        reasons: Callable[[], AbstractContextManager[list[str]]] = sdpa_reasons
        if kind in self._chosen:
            allowed = [self._chosen[kind]]
            reasons = _no_reasons  # this call is timed
        refused = ""
        for backend in allowed:
            try:
                with reasons() as why, sdpa_kernel(getattr(SDPBackend, backend)):
                    out = F.scaled_dot_product_attention(q, k, v, **options)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                refused = " ".join([str(error), *why])
            else:
                self._chosen[kind] = backend
                self.kernel = _KERNELS[backend]
                return out
        raise RuntimeError(f"no fused SDPA kernel takes this {kind}: {refused}")


def load_cuda_12_runtime() -> None:
    """Load libcudart.so.12, if the package nvidia-cuda-runtime-cu12 is there. xformers' extension
    needs it, and torch from 2.11 on brings that of CUDA 13 only."""
    try:
        files = metadata.files("nvidia-cuda-runtime-cu12") or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name.startswith("libcudart.so."):
            ctypes.CDLL(str(file.locate()))


class XformersAttention:
    """xformers.ops.memory_efficient_attention. Raises ImportError where xformers is missing. It
    picks an operator by shape and bias: ``kernel`` is the last one that a call found out, as it
    does where ``kernel`` is None."""

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
        return self._attend(
            q,
            keys.flatten(0, 1),
            values.flatten(0, 1),
            bias,
        )

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


class KVCache:
    """A pool of ``tokens`` slots: K and V of (tokens, kv_heads, head_dim), filled with noise."""

    def __init__(
        self, tokens: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (tokens, kv_heads, head_dim)
        self.tokens = tokens
        self.k = torch.empty(shape, device=device, dtype=dtype).normal_()
        self.v = torch.empty(shape, device=device, dtype=dtype).normal_()

    def part(self, first: int, tokens: int) -> KVCache:
        """The cache that these slots are."""
        part = copy(self)
        part.tokens, part.k, part.v = tokens, self.k[first:][:tokens], self.v[first:][:tokens]
        return part


Attention = SdpaAttention | XformersAttention
"""One way to compute attention. q is (tokens, heads, dim); k and v (tokens, kv_heads, dim).

A bias is the attention mask: an engine makes it once an iteration, not once a layer, so it is not
timed. ``kernel`` is the kernel of the last call; None lets the next call find it.
"""


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    wanted: AttentionChoice = "auto",
) -> tuple[Attention, str]:
    """The attention to time, and why it is not xformers ("" where it is). On CUDA each of its calls
    was tried with these sizes. Raises ValueError with the reason where what is ``wanted`` does not
    work, or with "auto" neither xformers nor SDPA."""
    if device.type != "cuda":
        if wanted not in ("auto", "sdpa"):
            raise ValueError(f"--attention {wanted}: needs CUDA")
        return SdpaAttention(device, dtype), "xformers' attention needs CUDA"
    why: list[str] = []
    for choice in ("xformers", "sdpa") if wanted == "auto" else (wanted,):
        try:
            attention: Attention = (
                XformersAttention()
                if choice == "xformers"
                else SdpaAttention(device, dtype, choice)
            )
            _try_all(attention, device, dtype, (heads, kv_heads, head_dim))
        except Exception as error:  # a missing library, an operator that refuses the shape, ...
            why.append(f"{choice} failed: {_refusal(error)}")
        else:
            if choice != "xformers" and not why:
                why.append(f"{choice} was asked for")
            return attention, "; ".join(why)
    raise ValueError(f"--attention {wanted}: {'; '.join(why)}")


def _try_all(
    attention: Attention,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
) -> None:
    """Try each call of a profile or the engine, so that none fails later: operators differ in the
    biases that they accept. ``sizes`` are heads, KV heads, head dimension."""
    heads, kv_heads, dim = sizes
    cache = KVCache(64, kv_heads, dim, device, dtype)
    q = torch.zeros(16, heads, dim, device=device, dtype=dtype)
    for context in (0, 16):
        keys, values = cache.k[: context + 16], cache.v[: context + 16]
        attention.kernel = None
        attention.prefill(q, keys, values, attention.prefill_bias(16, context))
    padded = (2, 32, kv_heads, dim)
    for bias in (attention.decode_bias(2, 8, 32), attention.skewed_bias([8, 3], 32)):
        attention.kernel = None
        attention.decode(
            q[:2],
            cache.k.view(padded),
            cache.v.view(padded),
            9,
            bias,
        )
    if isinstance(attention, XformersAttention):
        attention.kernel = None
        attention.prefill(
            q[:2],
            cache.k,
            cache.v,
            attention.gappy_bias([4, 40], [8, 3], 64),
        )
    torch.cuda.synchronize()


def _refusal(error: Exception) -> str:
    """One line: what failed, and the first of the reasons that xformers lists per operator."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {lines[0][:200]}"
    for before, line in pairwise(lines):
        if before.endswith("because:"):
            text += f" {before} {line[:200]}"
            if "CUDA support" in line:
                text += " (its extension needs libcudart.so.12: install nvidia-cuda-runtime-cu12)"
            break
    return text
