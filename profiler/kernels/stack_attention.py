"""Attention of a model's shard from a stack's tables: whole contexts, windows, latent and sparse
attention, and the recurrent layers that take its place.

A chunk after cached tokens is composed, unless it was measured: it takes as long as a prompt with
as many query-key pairs, in blocks of keys, and no less than a decode at that context, or than the
chunk alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np

from ..facts.device import DeviceSpec
from ..facts.formats import Kernels
from ..facts.layer_kinds import Latent, Recurrent
from ..facts.model import ModelSpec, load_model
from ..facts.ops import PREFILL
from ..facts.roofline import KEY_BLOCK, Array, attended_within
from ..physics.shard_times import composed_prefill
from ..storage.strict import SpecError
from .attention_grid import (
    HeadGrid,
    alike,
    decode_us,
    fastest_us,
    prefill_us,
    prefix_us,
    together_us,
)
from .borrowed import with_borrowed
from .sparse_law import SparseLaw
from .stack_file import Arrays, KernelFit, StackSpec, stored

#: The tables of latent attention, which are by heads only.
LATENT = "mla"
#: Ends the version of what was not timed alone: the whole block of attention was.
LESS = "(block less GEMMs and launches)"
#: The attention of all published rows: DeepSeek V3's.
MEASURED_LATENT = Latent(512, 64, 128, 128, query_rank=1536)
#: Decodes of latent attention by ranks of data-parallel attention, where a stack was timed so. Then
#: SGLang runs other kernels than its tables by heads hold (FlashAttention 3 on Hopper): decodes in
#: bf16 whatever the cache's format is, and prompts as multi-head attention, for which the table of
#: TensorRT-LLM counts. SGLang's blocks on H200, less GEMMs, take 16 % less to 26 % more (prompts of
#: 2,048 to 16,384 tokens, 128 heads), and its own table 3.5 to 4.1 times as long as these (from
#: 4,096 tokens on): tests/profiler/test_wide.py has the comparison.
BLOCKS = "wide.decode.mla"
#: The half-width of prompts as TensorRT-LLM's, percent.
AS_TRTLLM_PCT = 25.0
#: The tables of sparse attention, by the shipped model whose block was measured.
SPARSE_TABLES = {"deepseek-v3.2": "dsa128", "glm-5": "dsa192"}
#: The tables of gated delta nets; their heads have ``STATE_HEAD`` x ``STATE_HEAD`` numbers, and a
#: prompt is scanned in chunks of so many tokens.
STATE, STATE_HEAD, STATE_CHUNK = "state.gdn", 128, 64
#: Stacks whose kernel for prompts needs keys and values of each head, also of cached tokens.
_PROJECT_AGAIN = ("vllm", "trtllm")

Slowed = Callable[[Array, Array], Array]


AttentionTable = HeadGrid | SparseLaw


@lru_cache(maxsize=256)
def shipped_table(device: str, stack: str, table: str) -> AttentionTable:
    """A shipped table of attention, cached with the laws fitted to it (:func:`decode_us`)."""
    return attention_table(stored(with_borrowed(device, stack, [table])[1], table))


def tables_of(kernels: Kernels, model: ModelSpec) -> list[str]:
    """The names of the tables that a model's attention needs: one prompt, several, decodes. Which
    one of sparse attention it is depends on what was measured, so none of it is here."""
    head = LATENT if model.latent is not None else str(model.head_dim)
    names = [] if model.indexer is not None else [f"{kernels.kv_cache_dtype}.{head}"]
    names += [STATE] if model.recurrent is not None else []
    return [f"{kind}.{name}" for name in names for kind in ("prefill", "added", "decode")]


def attention_table(arrays: Arrays) -> AttentionTable:
    """A stored table of attention: of prompts of sparse attention a law, else a grid."""
    return SparseLaw.from_arrays(arrays) if "log_rate" in arrays else HeadGrid.from_arrays(arrays)


def _sparse_table(model: ModelSpec) -> str:
    """The table of a model's sparse attention; empty where no block of its sizes was measured."""
    for name, table in SPARSE_TABLES.items():
        known = load_model(name)
        if (known.latent, known.indexer) == (model.latent, model.indexer):
            return table
    return ""


def alike_within(chunk: Array, context: Array, window: float) -> Array:
    """As :func:`alike`, in a layer with a window."""
    pairs = attended_within(chunk, context, window, KEY_BLOCK)
    short = np.sqrt(KEY_BLOCK**2 + 2 * pairs) - KEY_BLOCK
    # From the window on every token more brings as many pairs.
    far = (pairs + window * (window - 1) / 2) / (window + KEY_BLOCK - 0.5)
    return np.asarray(np.where(short <= window, short, far))


class StackAttention:
    """Attention of one ``tp`` rank of ``model``, microseconds of one layer. ``table`` gives a table
    of attention. ``slowed`` makes times of a chip with other memory from (time, bytes). ``kv_up``
    is the time of projecting keys and values of so many tokens again."""

    def __init__(
        self,
        spec: StackSpec,
        table: Callable[[str], AttentionTable],
        kernels: Kernels,
        model: ModelSpec,
        tp: int,
        device: DeviceSpec,
        slowed: Slowed,
        kv_up: Callable[[Array], Array],
    ) -> None:
        self.spec, self._table = spec, table
        self.kernels, self.model, self.tp = kernels, model, tp
        self.heads, self.kv_heads = model.heads_per_rank(tp)
        self._device = device.name
        self._bandwidth, self._units = device.memory_bandwidth, device.num_sms
        self._slowed, self._kv_up = slowed, kv_up
        if model.indexer is not None:
            if not _sparse_table(model):
                known = " and ".join(SPARSE_TABLES)
                raise SpecError(
                    f"{model.name}: sparse attention was measured with the sizes of {known} only"
                )
        elif model.latent is not None and model.latent.kernel != MEASURED_LATENT.kernel:
            raise SpecError(
                f"{model.name}: latent attention was measured with (kv_rank, rope_dim, nope_dim, "
                f"value_dim) {MEASURED_LATENT.kernel} only, not {model.latent.kernel}"
            )
        for kind in ("prefill", "decode"):
            spec.need(kind, self._name, "KV dtype, head_dim")
        #: The layers with a state in the place of attention.
        self.state: StateTimes | None = None
        if model.recurrent is not None:
            self.state = StateTimes(spec, self._named, model.name, model.recurrent, tp)
        #: The tokens that a query attends to, whatever the context.
        self._reach = model.indexer.top_k if model.indexer else np.inf

    def prefill(self, chunk: Array, context: Array) -> Array:
        """One sequence's chunk after ``context`` cached tokens, in a mean layer."""
        state = self.state.prefill(chunk) if self.state else 0.0
        return self._mean(lambda window: self._prefill(chunk, context, window), state)

    def decode(self, batch: Array, context: Array) -> Array:
        """One token for each of ``batch`` sequences with ``context`` cached tokens, in a mean
        layer."""
        state = self.state.decode(batch) if self.state else 0.0
        return self._mean(lambda window: self._decode(batch, context, window), state)

    def added(self, chunk: Array) -> Array:
        """The time that each of several equal chunks adds to their call, in a mean layer: a row for
        each of :attr:`batches`."""
        state = self.state.added(self.batches, chunk) if self.state else 0.0
        return self._mean(lambda window: self._added(chunk, window), state)

    def _mean(self, time: Callable[[int], Array], state: Array | float) -> Array:
        """The mean over the layers of the ``time`` with a window (0: with none), and of recurrent
        ones."""
        return self.model.mean_layer(time(0), time, state)

    def _composes(self, window: int) -> bool:
        return window > 0 and not self.windows_measured

    def _prefill(self, chunk: Array, context: Array, window: int = 0) -> Array:
        """A window that was measured: as long as a prompt with as many query-key pairs."""
        if self._composes(window):
            return composed_prefill(self._prefill, chunk, context, window)
        if self.model.indexer is not None:
            time = self._sparse_law.us(chunk, context, self.heads, self.model.indexer)
            return np.maximum(time, self._decode(np.ones_like(chunk), context + chunk))
        size = alike_within(chunk, context, window) if window else alike(chunk, context)
        grid, seen = self._grid("prefill", window), window or np.inf
        # A prompt of so many tokens; no less than one of the chunk, which is no longer.
        alone, pairs = (prefill_us(grid, n, *self._prompt_heads, seen) for n in (chunk, size))
        after = pairs = np.maximum(alone, pairs)
        if self.prefixes is not None and not window:
            grids = self._grid("prefix"), grid
            after = prefix_us(*grids, chunk, context, *self._prompt_heads, self._units)
            least = self._fastest(self._cache_bytes(context))
        else:
            if self.model.latent is not None and self.kernels.stack in _PROJECT_AGAIN:
                again = np.where(
                    context > 0,
                    self._kv_up(np.maximum(context, 1)),
                    0.0,
                )
                after = pairs = pairs + again
            if self._blocks is not None:
                other = self._blocks[0]
                sizes = (prefill_us(other, n, *self._prompt_heads) for n in (chunk, size))
                again = np.where(
                    context > 0,
                    self._kv_up(np.maximum(context, 1)),
                    0.0,
                )
                after = pairs = np.minimum(pairs, np.maximum(*sizes) + again)
            least = self._decode(np.ones_like(chunk), context + chunk, window)
        return np.where(context > 0, np.maximum(after, least), pairs)

    def _decode(self, batch: Array, context: Array, window: int = 0) -> Array:
        """No faster than HBM reads what is cached, up to the ``window``."""
        if self._composes(window):
            return self._decode(batch, np.minimum(context, window))
        grid, seen = self._grid("decode", window), window or self._reach
        time = decode_us(grid, batch, context + 1, self.heads, self.kv_heads, seen)
        if self._blocks is not None:
            other = decode_us(self._blocks[1], batch, context + 1, self.heads, 1, seen)
            time = np.minimum(time, other)
        num_bytes = batch * self._cache_bytes(np.minimum(context, window or np.inf))
        return np.maximum(self._slowed(time, num_bytes), self._fastest(num_bytes))

    def _added(self, chunk: Array, window: int = 0) -> Array:
        if self._composes(window):
            return composed_prefill(
                lambda size, _: self._added(size), chunk, np.zeros_like(chunk), window
            )
        grids = self._grid("prefill", window), self._grid("added", window)
        batch, seen = self.batches[:, None], window or np.inf
        return together_us(*grids, batch, chunk, *self._prompt_heads, seen) / batch

    @property
    def batches(self) -> Array:
        """Numbers of prompts in one call: the measured ones, from 2, and halves between."""
        measured = self._grid("added").sizes[0]
        return np.union1d(measured, 1.5 * measured[:-1])

    def measured(self, op: str) -> tuple[KernelFit, str]:
        """The table of an op, and the place of this rank's head counts in it: empty if measured,
        "heads" between measured ones, "beyond" them."""
        kind = "prefill" if op == PREFILL else "decode"
        heads = self._prompt_heads if op == PREFILL else (self.heads, self.kv_heads)
        if self._blocks is not None and op != PREFILL:
            return self.spec.kernels[BLOCKS], _place(self._blocks[1], heads, op)
        fit = self.spec.kernels[f"{kind}.{self._name}"]
        if kind == "prefill" and self.model.indexer is not None:
            return fit, "heads"
        return fit, _place(self._grid(kind), heads, op)

    @property
    def wider(self) -> float:
        """How many times the FLOPs of a prompt's query one of a decode takes at the same context.

        Decodes of latent attention multiply compressed keys and values, which are wider than those
        of a head ("absorbed"). So do prompts of sparse attention, and those of SGLang's tables on
        Hopper (:data:`BLOCKS`).
        """
        model, latent = self.model, self.model.latent
        absorbed = model.indexer is not None or (BLOCKS in self.spec.kernels and not self._blocks)
        if latent is None or absorbed:
            return 1.0
        return (latent.cached + latent.kv_rank) / (model.head_dim + latent.value_dim)

    @property
    def prompts_as_trtllm(self) -> bool:
        """Whether prompts count as TensorRT-LLM's, where faster (:data:`BLOCKS`)."""
        return self._blocks is not None

    @cached_property
    def _blocks(self) -> tuple[HeadGrid, HeadGrid] | None:
        """The other kernels for prompts and decodes (:data:`BLOCKS`)."""
        latent = self.model.latent is not None and self.model.indexer is None
        if self.kernels.dp == 1 or not latent or BLOCKS not in self.spec.kernels:
            return None
        prompts = shipped_table(self._device, "trtllm", f"prefill.{self._name}")
        assert isinstance(prompts, HeadGrid)
        return prompts, self._named(BLOCKS)

    @property
    def prefixes(self) -> KernelFit | None:
        """The table of chunks after cached tokens; None if they were not measured."""
        return self.spec.kernels.get(f"prefix.{self._name}")

    @property
    def together(self) -> KernelFit | None:
        """The table of several prompts in one call; None if they were not measured."""
        return self.spec.kernels.get(f"added.{self._name}")

    @property
    def composes_windows(self) -> bool:
        """Whether the model has windows that were not measured."""
        return self.model.windows is not None and not self.windows_measured

    @property
    def about_windows(self) -> str:
        """The origin of times within windows, in words; empty for a model without windows."""
        if self.model.windows is None:
            return ""
        how = "measured" if self.windows_measured else "composed"
        return (
            f"; {self.model.windows.layers} of {self.model.num_layers} layers within windows, {how}"
        )

    @cached_property
    def windows_measured(self) -> bool:
        """Whether the stack's tables hold the model's window."""
        return self.model.windows is not None and all(
            f"{kind}.{self._name}w{self.model.windows.tokens}" in self.spec.kernels
            for kind in ("prefill", "decode")
        )

    @cached_property
    def _sparse_law(self) -> SparseLaw:
        law = self._table(f"prefill.{self._name}")
        assert isinstance(law, SparseLaw)
        return law

    def _cache_bytes(self, tokens: Array) -> Array:
        """Bytes that are read of the cache of so many tokens: an indexer's keys of all, and what is
        attended to."""
        kv, index = self.kernels.number_bytes.kv, self.model.indexer
        if index is None:
            return np.asarray(1.0 * tokens * self.model.cached_bytes(self.tp, kv))
        whole = self.model.cached_bytes(self.tp, kv) - index.key_bytes
        return np.asarray(index.key_bytes * tokens + whole * np.minimum(tokens, index.top_k))

    def _fastest(self, num_bytes: Array) -> Array:
        return fastest_us(num_bytes, self._bandwidth)

    @cached_property
    def _name(self) -> str:
        """The name of its tables: of sparse attention in the format of the weights, if measured."""
        head = LATENT if self.model.latent is not None else str(self.model.head_dim)
        if self.model.indexer is not None:
            head = _sparse_table(self.model)
            names = [f"{head}-{dtype}" for dtype in (self.kernels.dtype, "bf16", "fp8_block")]
            kv = self.kernels.kv_cache_dtype
            there = [name for name in names if f"prefill.{kv}.{name}" in self.spec.kernels]
            head = next(iter(there), head)
        return f"{self.kernels.kv_cache_dtype}.{head}"

    @property
    def _prompt_heads(self) -> tuple[int, int]:
        """Query and KV heads in the table of prompts: latent attention has keys for every head."""
        return self.heads, self.heads if self.model.latent is not None else self.kv_heads

    def _grid(self, kind: str, window: int = 0) -> HeadGrid:
        return self._named(f"{kind}.{self._name}" + (f"w{window}" if window else ""))

    def _named(self, table: str) -> HeadGrid:
        grid = self._table(table)
        assert isinstance(grid, HeadGrid)
        return grid


def _place(grid: HeadGrid, heads: tuple[int, int], op: str) -> str:
    if grid.measured(*heads):
        return ""
    return "heads" if grid.between(*heads, decode=op != PREFILL) else "beyond"


class StateTimes:
    """Recurrent layers of one ``tp`` rank, microseconds: the convolution and the state's scan or
    step, beside the projections.

    Measured are gated delta nets with heads of 128 x 128 numbers. A state of other sizes, and that
    of Mamba 2, counts as so many such heads as have as many numbers (:attr:`borrowed`).
    Raises SpecError where the stack's were not measured, ValueError where ``tp`` does not divide
    the heads.
    """

    def __init__(
        self,
        spec: StackSpec,
        grid: Callable[[str], HeadGrid],
        name: str,
        recurrent: Recurrent,
        tp: int,
    ) -> None:
        for kind in ("prefill", "decode"):
            spec.need(kind, STATE, f"recurrent layers, which {name} has; table")
        self._fits, self._table, self.borrowed = spec.kernels, grid, recurrent.kind != "gdn"
        values, keys = recurrent.heads_per_rank(tp)
        numbers = recurrent.key_dim * recurrent.value_dim
        if self.borrowed or numbers != STATE_HEAD**2:
            self.borrowed = True
            values = max(1, round(values * numbers / STATE_HEAD**2))
            keys = max(1, min(keys, values))
        self.heads = values, keys

    def measured(self, op: str) -> tuple[KernelFit, str]:
        """As :meth:`StackAttention.measured`."""
        table = f"{'prefill' if op == PREFILL else 'decode'}.{STATE}"
        return self._fits[table], _place(self._table(table), self.heads, op)

    def prefill(self, chunk: Array) -> Array:
        """One sequence's chunk, whatever its context."""
        return prefill_us(self._table(f"prefill.{STATE}"), chunk, *self.heads, STATE_CHUNK)

    def added(self, batches: Array, chunk: Array) -> Array:
        """The time that each of several equal chunks adds to their call: a row a batch."""
        grids = self._table(f"prefill.{STATE}"), self._table(f"added.{STATE}")
        batch = batches[:, None]
        return together_us(*grids, batch, chunk, *self.heads, STATE_CHUNK) / batch

    def decode(self, batch: Array) -> Array:
        """A step of ``batch`` sequences."""
        return decode_us(
            self._table(f"decode.{STATE}"),
            batch,
            np.ones_like(batch),
            *self.heads,
            1,
        )
