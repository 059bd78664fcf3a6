"""A server's log of every second, beside the simulator's numbers at the same times.

The file is LLMServingSim's ``timeseries.csv``. ``t`` is in seconds after the run began. Tokens of
prompts and generated ones count since the row before; requests that run and wait, and the share of
the KV cache in use, at that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.config.errors import ConfigError
from profiler.bundle.csv_cells import numbers, read_cells
from profiler.bundle.tables import BundleError
from simulator.loop.records import Floats

_COLUMNS = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")
TICK_LABELS = {
    "running": "requests running, mean",
    "waiting": "requests waiting, mean",
    "kv_cache_pct": "KV cache in use, mean (%)",
    "decode_ms": "iteration of decodes alone, nobody waiting (ms)",
}


@dataclass(frozen=True, eq=False)
class Ticks:
    """A row a tick: ``t`` (s), ``prompt`` and ``generated`` tokens since the tick before, and
    ``running``, ``waiting``, ``kv_cache_pct`` at it."""

    t: Floats
    prompt: Floats
    generated: Floats
    running: Floats
    waiting: Floats
    kv_cache_pct: Floats

    def means(self) -> dict[str, float | None]:
        """Means over ticks; ``decode_ms`` is the time of an iteration while only decodes run:
        between ticks without prompts at which nobody waits."""
        calm = (self.waiting[1:] == 0) & (self.waiting[:-1] == 0) & (self.prompt[1:] == 0)
        calm &= self.generated[1:] > 0
        decoding_s = ((self.running[1:] + self.running[:-1]) / 2 * np.diff(self.t))[calm].sum()
        tokens = self.generated[1:][calm].sum()
        found = {key: float(getattr(self, key).mean()) for key in TICK_LABELS if key != "decode_ms"}
        return {**found, "decode_ms": float(1e3 * decoding_s / tokens) if tokens else None}


def read_ticks(path: Path) -> Ticks:
    """The ticks of a file. Raises ConfigError, naming file, row and column."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        raw = read_cells(path)
        missing = [name for name in _COLUMNS if name not in raw.columns]
        if missing:
            raise BundleError(f"{path}: column {missing[0]!r} is missing; has {list(raw.columns)}")
        columns = [numbers(raw[name], path) for name in _COLUMNS]
    except BundleError as error:
        raise ConfigError(str(error)) from None
    if len(raw) < 2 or (np.diff(columns[0]) <= 0).any():
        raise ConfigError(f"{path}: t must grow from row to row, over two rows at least")
    return Ticks(*columns)


def simulated_ticks(
    t: Floats, iterations: pd.DataFrame, requests: pd.DataFrame, kv_capacity: int
) -> Ticks:
    """The same of a simulated run: its tables, and the KV tokens that it has room for."""
    size = (iterations["chunks"] + iterations["decodes"]).to_numpy(np.float64)
    start, finish = (iterations[name].to_numpy() for name in ("start_s", "finish_s"))
    running = _until(t, start, size) - _until(t, finish, size)
    arrival, one = requests["arrival_s"].to_numpy(), np.ones(len(requests))
    inside = _until(t, arrival, one) - _until(t, arrival + requests["latency_s"].to_numpy(), one)
    formed = np.searchsorted(np.sort(start), t, "right") - 1
    kv_tokens = iterations["kv_tokens"].to_numpy(np.float64)[np.argsort(start, kind="stable")]
    in_use = np.where(running > 0, kv_tokens[np.maximum(formed, 0)], 0.0)
    prompt, generated = (
        np.diff(_until(t, finish, iterations[name].to_numpy(np.float64)), prepend=0.0)
        for name in ("prefill_tokens", "decodes")
    )
    share = 100 * in_use / kv_capacity
    return Ticks(t, prompt, generated, running, inside - running, share)


def _until(t: Floats, when: Floats, amount: Floats) -> Floats:
    """The amounts of everything that happened by each time."""
    order = np.argsort(when, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(amount[order])])
    return np.asarray(total[np.searchsorted(when[order], t, "right")])
