"""From the public tables to the surfaces of wide expert parallelism: experts that many ranks share,
and the exchange of tokens among those ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.experiments.lab.sources import aiconfigurator as tables
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import DISTRIBUTIONS, MOE_DTYPES, MoeDtype
from sarathi_sim.profiler.kernels.exchange_curves import exchanges_left_out, fit_exchange
from sarathi_sim.profiler.kernels.left_out import Fitted, messages, record
from sarathi_sim.profiler.kernels.moe_surface import rates_of
from sarathi_sim.profiler.kernels.own_ops import fit_experts
from sarathi_sim.profiler.kernels.reduce_curves import fit_reduce
from sarathi_sim.profiler.kernels.wide_times import GATHERS, MODES, PARTS, WIDE

#: A time of DeepEP's normal mode within this factor of the host's launches is no kernel's.
_LAUNCHES = 1.3
#: Formats in which tokens are dispatched; the other parts do not depend on it.
_SENT: tuple[MoeDtype, ...] = ("nvfp4", "fp8", "bf16")


def fit_wide(datasets: Path, device: str, stack: str) -> Iterator[Fitted]:
    """Every table of wide expert parallelism of a stack; over PCIe the gathers alone."""
    if load_device(device).intra_node.kind.startswith("NVLink"):
        yield from _experts(datasets, device, stack)
        yield from _exchanges(datasets, device, stack)
    for op in GATHERS:
        if table := tables.all_to_alls(datasets, device, op):
            rows, version = table
            for gpus in np.unique(rows["gpus"]).tolist():
                yield _gather(f"{WIDE}.{op}.{gpus}", rows[rows["gpus"] == gpus], version)


def _experts(datasets: Path, device: str, stack: str) -> Iterator[Fitted]:
    for dtype in MOE_DTYPES:
        found, even = {}, rates_of(device, dtype, "balanced")
        for spread in DISTRIBUTIONS:
            if table := tables.experts(datasets, device, stack, dtype, spread, wide=True):
                found[f"{WIDE}.experts.{dtype}.{spread}"] = *table, rates_of(device, dtype, spread)
            if table := tables.even_experts(datasets, device, stack, dtype, spread):
                found[f"{WIDE}.even.{dtype}.{spread}"] = *table, even
        yield from fit_experts(found, wide=True)
    for mode in MODES:
        found = {}
        for spread in DISTRIBUTIONS:
            if table := tables.deepep_experts(datasets, device, stack, mode, spread):
                rows, version = table
                if mode == "normal":
                    floor = rows["time_us"].quantile(0.05)
                    rows = rows[rows["time_us"] > _LAUNCHES * floor]
                rates = rates_of(device, "fp8_block", spread)
                found[f"{WIDE}.{mode}_experts.fp8_block.{spread}"] = rows, version, rates
        yield from fit_experts(found, wide=True)


def _exchanges(datasets: Path, device: str, stack: str) -> Iterator[Fitted]:
    for mode, between in product(MODES, (False, True)):
        if table := tables.deepep(datasets, device, stack, mode, between):
            name = f"{WIDE}.{mode}{'.nodes' if between else ''}"
            yield _exchange(name, *table, each=mode == "low_latency")
    for (backend, parts), sent in product(PARTS.items(), _SENT):
        for part in parts if sent == _SENT[0] else ("dispatch",):
            if table := tables.nvlink_exchange(datasets, device, stack, backend, part, sent):
                yield _exchange(f"{WIDE}.{backend}.{part}.{sent}", *table)


def _exchange(name: str, rows: pd.DataFrame, version: str, each: bool = False) -> Fitted:
    curves, time = fit_exchange(rows, each), rows["time_us"].to_numpy(np.float64)
    fit = record(version, len(rows), time, time, curves.log_us.size, exchanges_left_out(rows, each))
    return Fitted(name, curves, fit)


def _gather(name: str, rows: pd.DataFrame, version: str) -> Fitted:
    curve, time = fit_reduce(rows), rows["time_us"].to_numpy(np.float64)
    fit = record(version, len(rows), time, time, len(rows), {"sizes": messages(rows)})
    return Fitted(name, curve, fit)
