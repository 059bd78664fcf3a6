"""Attention of a model's shard from a stack's tables: whole contexts, windows, latent attention.

A chunk after cached tokens is composed, unless it was measured: it takes as long as a prompt with
as many query-key pairs, in blocks of keys, and no less than a decode at that context, or than the
chunk alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.layer_kinds import Latent, mean_layer
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import PREFILL
from sarathi_sim.profiler.facts.roofline import KEY_BLOCK, Array, attended_within
from sarathi_sim.profiler.kernels.attention_grid import (
    HeadGrid,
    alike,
    decode_us,
    fastest_us,
    prefill_us,
    prefix_us,
    together_us,
)
from sarathi_sim.profiler.kernels.stack_file import KernelFit, StackSpec, load_stack, stored
from sarathi_sim.profiler.physics.shard_times import composed_prefill
from sarathi_sim.profiler.storage.strict import SpecError

#: The tables of latent attention, which are by heads only.
LATENT = "mla"
#: Ends the version of what was not timed alone: the whole block of attention was.
LESS = "(block less GEMMs and launches)"
#: The attention of all published rows: DeepSeek V3's.
MEASURED_LATENT = Latent(512, 64, 128, 128, query_rank=1536)
#: Stacks whose kernel for prompts needs keys and values of each head, also of cached tokens.
_PROJECT_AGAIN = ("vllm", "trtllm")

Slowed = Callable[[Array, Array], Array]


@lru_cache(maxsize=256)
def shipped_grid(device: str, stack: str, table: str) -> HeadGrid:
    """A shipped table of attention, cached with the laws fitted to it (:func:`decode_us`)."""
    return HeadGrid.from_arrays(stored(load_stack(device, stack)[1], table))


def alike_within(chunk: Array, context: Array, window: float) -> Array:
    """As :func:`alike`, in a layer with a window."""
    pairs = attended_within(chunk, context, window, KEY_BLOCK)
    short = np.sqrt(KEY_BLOCK**2 + 2 * pairs) - KEY_BLOCK
    # From the window on every token more brings as many pairs.
    far = (pairs + window * (window - 1) / 2) / (window + KEY_BLOCK - 0.5)
    return np.asarray(np.where(short <= window, short, far))


class StackAttention:
    """Attention of one ``tp`` rank of ``model``, microseconds of one layer.

    ``grid`` gives a table of attention. ``slowed`` makes times of a chip with other memory from
    (time, bytes). ``kv_up`` is the time of projecting keys and values of so many tokens again.
    """

    def __init__(
        self,
        spec: StackSpec,
        grid: Callable[[str], HeadGrid],
        kernels: Kernels,
        model: ModelSpec,
        tp: int,
        device: DeviceSpec,
        slowed: Slowed,
        kv_up: Callable[[Array], Array],
    ) -> None:
        self.spec, self._table = spec, grid
        self.kernels, self.model, self.tp = kernels, model, tp
        self.heads, self.kv_heads = model.heads_per_rank(tp)
        self._bandwidth, self._units = device.memory_bandwidth, device.num_sms
        self._slowed, self._kv_up = slowed, kv_up
        if model.latent is not None and model.latent.kernel != MEASURED_LATENT.kernel:
            raise SpecError(
                f"{model.name}: latent attention was measured with (kv_rank, rope_dim, nope_dim, "
                f"value_dim) {MEASURED_LATENT.kernel} only, not {model.latent.kernel}"
            )
        for kind in ("prefill", "decode"):
            spec.need(kind, self._name, "KV dtype, head_dim")

    def prefill(self, chunk: Array, context: Array) -> Array:
        """One sequence's chunk after ``context`` cached tokens, in a mean layer."""
        return self._mean(lambda window: self._prefill(chunk, context, window))

    def decode(self, batch: Array, context: Array) -> Array:
        """One token for each of ``batch`` sequences with ``context`` cached tokens, in a mean
        layer."""
        return self._mean(lambda window: self._decode(batch, context, window))

    def added(self, chunk: Array) -> Array:
        """The time that each of several equal chunks adds to their call, in a mean layer: a row for
        each of :attr:`batches`."""
        return self._mean(lambda window: self._added(chunk, window))

    def _mean(self, time: Callable[[int], Array]) -> Array:
        """The mean over the layers of the ``time`` with a window (0: with none)."""
        return mean_layer(self.model.windows, self.model.num_layers, time(0), time)

    def _composes(self, window: int) -> bool:
        return window > 0 and not self.windows_measured

    def _prefill(self, chunk: Array, context: Array, window: int = 0) -> Array:
        """A window that was measured: as long as a prompt with as many query-key pairs."""
        if self._composes(window):
            return composed_prefill(self._prefill, chunk, context, window)
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
                again = np.where(context > 0, self._kv_up(np.maximum(context, 1)), 0.0)
                after = pairs = pairs + again
            least = self._decode(np.ones_like(chunk), context + chunk, window)
        return np.where(context > 0, np.maximum(after, least), pairs)

    def _decode(self, batch: Array, context: Array, window: int = 0) -> Array:
        """No faster than HBM reads what is cached, up to the ``window``."""
        if self._composes(window):
            return self._decode(batch, np.minimum(context, window))
        grid, seen = self._grid("decode", window), window or np.inf
        time = decode_us(grid, batch, context + 1, self.heads, self.kv_heads, seen)
        num_bytes = self._cache_bytes(batch * np.minimum(context, seen))
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
        fit, grid = self.spec.kernels[f"{kind}.{self._name}"], self._grid(kind)
        if grid.measured(*heads):
            return fit, ""
        return fit, "heads" if grid.between(*heads, decode=op != PREFILL) else "beyond"

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

    def _cache_bytes(self, tokens: Array) -> Array:
        numbers = 1.0 * tokens * self.model.cached_numbers(self.tp)
        return np.asarray(self.kernels.number_bytes.kv * numbers)

    def _fastest(self, num_bytes: Array) -> Array:
        return fastest_us(num_bytes, self._bandwidth)

    @property
    def _name(self) -> str:
        head = LATENT if self.model.latent is not None else str(self.model.head_dim)
        return f"{self.kernels.kv_cache_dtype}.{head}"

    @property
    def _prompt_heads(self) -> tuple[int, int]:
        """Query and KV heads in the table of prompts: latent attention has keys for every head."""
        return self.heads, self.heads if self.model.latent is not None else self.kv_heads

    def _grid(self, kind: str, window: int = 0) -> HeadGrid:
        return self._table(f"{kind}.{self._name}" + (f"w{window}" if window else ""))
