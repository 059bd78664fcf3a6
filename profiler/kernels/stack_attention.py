"""Attention of a model's shard from a stack's tables: whole contexts, windows, latent attention.

A chunk after cached tokens is composed, unless that was measured: it takes as long as a prompt with
as many query-key pairs, in blocks of keys, and no less than one decode at that context, or than it
takes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.layer_kinds import Latent
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import PREFILL
from sarathi_sim.profiler.facts.roofline import KEY_BLOCK, Array, attended_within
from sarathi_sim.profiler.kernels.attention_grid import (
    HeadGrid,
    decode_us,
    fastest_us,
    prefill_us,
    together_us,
)
from sarathi_sim.profiler.kernels.prefix_grid import alike, prefix_us
from sarathi_sim.profiler.kernels.stack_file import KernelFit, StackSpec, load_stack, stored
from sarathi_sim.profiler.physics.layer_mix import composed_decode, composed_prefill
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
    """A shipped table of attention; what is fitted over it (:func:`decode_us`) is kept with it."""
    return HeadGrid.from_arrays(stored(load_stack(device, stack)[1], table))


def alike_within(chunk: Array, context: Array, window: float) -> Array:
    """The same in a layer with a window."""
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
        """One sequence's chunk after ``context`` cached tokens."""
        pairs = self._prompt(chunk, alike(chunk, context))
        if self.model.latent is not None and self.kernels.stack in _PROJECT_AGAIN:
            pairs = pairs + np.where(context > 0, self._kv_up(np.maximum(context, 1)), 0.0)
        if self.prefixes is None:
            after, least = pairs, self.decode(np.ones_like(chunk), context + chunk)
        else:
            grids = self._grid("prefix"), self._grid("prefill")
            after = prefix_us(*grids, chunk, context, *self._prompt_heads, self._units)
            least = self._fastest(self._cache_bytes(context))
        return np.where(context > 0, np.maximum(after, least), pairs)

    def decode(self, batch: Array, context: Array) -> Array:
        """One token for each of ``batch`` sequences with ``context`` cached tokens."""
        return self._decoded(self._grid("decode"), batch, context)

    def prefill_within(self, chunk: Array, context: Array) -> Array:
        """A chunk in a layer with the model's window: as long as a prompt with as many query-key
        pairs in such a layer, where that was measured, else composed."""
        if not self.windows_measured:
            whole = self.prefill
            return composed_prefill(
                lambda size, held, model, tp: whole(size, held), chunk, context, self.model, self.tp
            )
        window = self._window
        pairs = self._prompt(chunk, alike_within(chunk, context, window), window)
        reading = self.decode_within(np.ones_like(chunk), context + chunk)
        return np.where(context > 0, np.maximum(pairs, reading), pairs)

    def _prompt(self, chunk: Array, tokens: Array, window: int = 0) -> Array:
        """A prompt of so many ``tokens``; no less than one of ``chunk``, which is no longer."""
        grid, seen = self._grid("prefill", window), window or np.inf
        alone, alike = (prefill_us(grid, n, *self._prompt_heads, seen) for n in (chunk, tokens))
        return np.maximum(alone, alike)

    def added(self, chunk: Array) -> Array:
        """What each of several equal chunks in one call adds: a row for each of :attr:`batches`."""
        return self._added(chunk)

    def added_within(self, chunk: Array) -> Array:
        """The same in a layer with the model's window."""
        if not self.windows_measured:
            return composed_prefill(
                lambda size, *_: self.added(size), chunk, np.zeros_like(chunk), self.model, self.tp
            )
        return self._added(chunk, self._window)

    def _added(self, chunk: Array, window: int = 0) -> Array:
        grids = self._grid("prefill", window), self._grid("added", window)
        batch, seen = self.batches[:, None], window or np.inf
        return together_us(*grids, batch, chunk, *self._prompt_heads, seen) / batch

    @property
    def batches(self) -> Array:
        """Numbers of prompts in one call: those that were measured, from 2, and halves between."""
        measured = self._grid("added").sizes[0]
        return np.union1d(measured, 1.5 * measured[:-1])

    def decode_within(self, batch: Array, context: Array) -> Array:
        """Decodes in a layer with the model's window."""
        if not self.windows_measured:
            whole = self.decode
            return composed_decode(
                lambda size, held, model, tp: whole(size, held), batch, context, self.model, self.tp
            )
        return self._decoded(self._grid("decode", self._window), batch, context, self._window)

    def measured(self, op: str) -> tuple[KernelFit, str]:
        """The table of an op, and where in it this rank's head counts are: empty where they were
        measured, "heads" between those measured, "beyond" them."""
        kind = "prefill" if op == PREFILL else "decode"
        heads = self._prompt_heads if op == PREFILL else (self.heads, self.kv_heads)
        fit, grid = self.spec.kernels[f"{kind}.{self._name}"], self._grid(kind)
        if grid.measured(*heads):
            return fit, ""
        return fit, "heads" if grid.between(*heads, decode=op != PREFILL) else "beyond"

    @property
    def prefixes(self) -> KernelFit | None:
        """The table of chunks after cached tokens, where these were measured."""
        return self.spec.kernels.get(f"prefix.{self._name}")

    @property
    def together(self) -> KernelFit | None:
        """The table of several prompts in one call, where these were measured."""
        return self.spec.kernels.get(f"added.{self._name}")

    @property
    def composes_windows(self) -> bool:
        """Whether the model has windows that were not measured."""
        return self.model.windows is not None and not self.windows_measured

    @property
    def about_windows(self) -> str:
        """Of a model with windows: where the times within them come from."""
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
            f"{kind}.{self._name}w{self._window}" in self.spec.kernels
            for kind in ("prefill", "decode")
        )

    def _decoded(
        self, grid: HeadGrid, batch: Array, context: Array, window: float = np.inf
    ) -> Array:
        """No faster than HBM reads what is cached, up to the ``window``."""
        time = decode_us(grid, batch, context + 1, self.heads, self.kv_heads, window)
        num_bytes = self._cache_bytes(batch * np.minimum(context, window))
        return np.maximum(self._slowed(time, num_bytes), self._fastest(num_bytes))

    def _cache_bytes(self, tokens: Array) -> Array:
        numbers = 1.0 * tokens * self.model.cached_numbers(self.tp)
        return np.asarray(self.kernels.number_bytes.kv * numbers)

    def _fastest(self, num_bytes: Array) -> Array:
        return fastest_us(num_bytes, self._bandwidth)

    @property
    def _window(self) -> int:
        assert self.model.windows is not None
        return self.model.windows.tokens

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
