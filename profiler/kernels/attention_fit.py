"""Fits of a stack's attention tables: prompts, several in one call, and decodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import KV_BYTES, KV_DTYPES, KvDtype
from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.kernels import left_out
from sarathi_sim.profiler.kernels.attention_grid import (
    HeadGrid,
    fastest_us,
    fit_added,
    fit_decode,
    fit_prefill,
)
from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
from sarathi_sim.profiler.kernels.latent_rows import latent_rows
from sarathi_sim.profiler.kernels.left_out import Errors, Fitted, record
from sarathi_sim.profiler.kernels.stack_attention import LATENT, MEASURED_LATENT
from sarathi_sim.profiler.public import kernel_tables as tables

#: A table with fewer pairs of head counts is a stub.
_FEWEST_HEADS = 4
#: Head dimensions of plain attention, by sliding window (0: none); those with which published
#: models use a window.
_WINDOWS = {0: (64, 128, 256), 128: (64,), 1024: (128, 256), 8192: (128,)}


def attention_fits(
    datasets: Path, device: str, stack: str, gemms: GemmLattice | None
) -> Iterator[Fitted]:
    """Every table of attention; ``gemms`` are the stack's in bf16."""
    rate = load_device(device).memory_bandwidth
    for kv_dtype, kind in product(KV_DTYPES, ("prefill", "decode")):
        read = tables.prefill if kind == "prefill" else tables.decode
        for window, head_dims in _WINDOWS.items():
            attention = read(datasets, device, stack, kv_dtype, window)
            for head_dim in head_dims if attention else ():
                assert attention
                rows = attention[0].query(f"head_dim == {head_dim}").drop(columns="head_dim")
                if rows.groupby(["heads", "kv_heads"]).ngroups < _FEWEST_HEADS:
                    continue
                name = f"{kv_dtype}.{head_dim}" + (f"w{window}" if window else "")
                seen = window or np.inf
                if kind == "decode":
                    numbers = 2 * head_dim * rows["kv_heads"]
                    least = reading_us(rows, numbers, kv_dtype, rate, seen)
                    yield fit_attention(kind, f"decode.{name}", rows, attention[1], least, seen)
                    continue
                alone = rows[rows["batch"] == 1]
                yield fit_attention(kind, f"prefill.{name}", alone, attention[1], window=seen)
                if len(alone) < len(rows):
                    yield fit_together(f"added.{name}", rows, attention[1], seen)
        latent = latent_rows(datasets, device, stack, kind, kv_dtype, gemms)
        if latent is not None:
            rows, version = latent
            reading: Array | float = 0.0
            if kind == "decode":
                reading = reading_us(rows, MEASURED_LATENT.cached, kv_dtype, rate)
            yield fit_attention(kind, f"{kind}.{kv_dtype}.{LATENT}", rows, version, reading)


def reading_us(
    rows: pd.DataFrame,
    numbers: pd.Series[int] | int,
    kv_dtype: KvDtype,
    bandwidth: float,
    window: float = np.inf,
) -> Array:
    """What reading the cache of decodes takes at least: ``numbers`` a token, up to the window."""
    tokens = rows["batch"] * np.minimum(rows["context"] - 1, window)
    num_bytes = KV_BYTES[kv_dtype] * numbers * tokens
    return fastest_us(num_bytes.to_numpy(np.float64), bandwidth)


def fit_attention(
    kind: str,
    table: str,
    rows: pd.DataFrame,
    version: str,
    least_us: Array | float = 0.0,
    window: float = np.inf,
) -> Fitted:
    """The surface of a table of prefill or decode attention of one head dimension.

    ``least_us`` is what reading each decode's cache from HBM takes at least; queries see
    ``window`` keys.
    """
    if kind == "prefill":
        grid = fit_prefill(rows)
        time = clean = rows["time_us"].to_numpy(np.float64)
        kinds = {
            "sizes": left_out.prefill_sizes(rows, window),
            "heads": left_out.prefill_heads(rows, window),
            "beyond": left_out.prefill_heads(rows, window, inside=False),
        }
    else:
        published = rows["time_us"].to_numpy(np.float64)
        rows = rows.assign(time_us=np.maximum(published, least_us))
        # Whichever of two ways to other head counts is less far off on those left out.
        ways = {way: [*left_out.decode_heads(rows, way, window)] for way in (False, True)}
        by_group = _p95(ways[True]) < _p95(ways[False])
        grid = fit_decode(rows, by_group, window)
        time, clean = published, _grid_times(grid, rows)
        kinds = {
            "sizes": left_out.decode_sizes(rows, window),
            "heads": iter(ways[by_group]),
            "beyond": left_out.decode_heads(rows, by_group, window, inside=False),
        }
    fit = record(version, len(rows), time, clean, grid.log_us.size, kinds)
    return Fitted(table, grid, fit)


def fit_together(table: str, rows: pd.DataFrame, version: str, window: float = np.inf) -> Fitted:
    """What prompts add to a batch of several, from a table of one head dimension."""
    grid, time = fit_added(rows), rows["time_us"].to_numpy(np.float64)
    kinds = {"batches": left_out.together(rows, window)}
    return Fitted(table, grid, record(version, len(rows), time, time, grid.log_us.size, kinds))


def _p95(errors: list[Errors]) -> float:
    found = left_out.summary(errors)
    return found.p95_pct if found is not None else np.inf


def _grid_times(grid: HeadGrid, rows: pd.DataFrame) -> Array:
    known = {tuple(pair): at for at, pair in enumerate(grid.heads.tolist())}
    pairs = zip(rows["heads"].tolist(), rows["kv_heads"].tolist(), strict=True)
    at = [known[pair] for pair in pairs]
    batches, contexts = grid.sizes
    places = np.searchsorted(batches, rows["batch"]), np.searchsorted(contexts, rows["context"])
    return np.asarray(np.exp(grid.log_us[(np.array(at), *places)]))
