"""Profiles for tests that need one: a calibrated device, or a stack's kernels, at useful sizes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.profiler.bundle.schema import Bundle, bundle_path, write_bundle
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.facts.ops import ALL_ROW_OPS, OPS, SCOPES
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.shard_times import TILE, DeviceTimes, ShardTimes, asked_at
from sarathi_sim.profiler.storage.files import DATASETS_VARIABLE

needs_datasets = pytest.mark.skipif(
    not os.environ.get(DATASETS_VARIABLE),
    reason=f"needs the public measurements: set {DATASETS_VARIABLE} to their folder",
)
_MOST_LOGIT_ROWS = 4096
_FAR = {2**i * half // 2 for i in range(13, 18) for half in (2, 3)}
_NEAR = {1, 8, *range(32, 257, 32), *range(33, 258, 32)}


def device_bundle(
    device: str, model: ModelSpec, tp: int, max_tokens: int = 131072, max_context: int = 8192
) -> Bundle:
    """The device model's times, as if they had been measured."""
    return sampled(DeviceTimes(device, model, tp), max_tokens, max_context)


def stack_bundle(
    device: str, model: ModelSpec, tp: int, kernels: Kernels, max_tokens: int = 131072
) -> Bundle:
    times = StackTimes(device, kernels, model, tp)
    return sampled(times, max_tokens, times.longest_context)


_ROOT = TemporaryDirectory(prefix="sarathi-sim-profiles-")


@cache
def profile_folder(device: str, model: str, tp: int) -> Path:
    """The folder of :func:`device_bundle`, written once a process."""
    path = bundle_path(Path(_ROOT.name), device, model, tp)
    write_bundle(device_bundle(device, load_model(model), tp), path)
    return path


def sampled(times: ShardTimes, max_tokens: int, max_context: int) -> Bundle:
    """A bundle of ``times`` at both sides of every half tile, and ever coarser beyond."""
    rows = [
        (op, int(n))
        for op in sorted(op for op in times.provenance() if op in ALL_ROW_OPS)
        for n in token_grid(min(max_tokens, _MOST_LOGIT_ROWS) if OPS[op].outputs else max_tokens)
    ]
    edges = {*range(64, 1025, 64), *range(1152, 2049, 128)}
    chunks = {1, 16, 32, 48, 96, 160, 224, 3072, 4096, 6144, *_FAR} | edges | {e + 1 for e in edges}
    before = {0, 1, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, *_FAR}
    batches = {*range(1, 33), 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512}
    contexts = {16, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, *_FAR, *_NEAR}
    messages = np.array([2**i * half // 2 for i in range(10, 33) for half in (2, 3)][:-1])
    sizes = Bundle(
        times.meta,
        pd.DataFrame(rows, columns=["op", "num_tokens"]),
        _pairs(chunk_tokens=_upto(chunks, max_context), context_tokens=_upto(before, max_context)),
        _pairs(batch_size=sorted(batches), context_tokens=_upto(contexts, max_context)),
        pd.DataFrame({"num_bytes": messages if times.tp > 1 else messages[:0]}),
        _pairs(num_bytes=messages.tolist(), scope=sorted(SCOPES)),
    )
    return asked_at(times, sizes)


def token_grid(most: int) -> list[int]:
    """Every one to 64, every 8 to 512 and 32 to 1024, both sides of every half tile to 4096, then
    ever coarser, where times are all but linear."""
    counts = {*range(1, 65), *range(64, 513, 8), *range(512, 1025, 32)}
    for edge in range(TILE // 2, 4097, TILE // 2):
        counts |= {edge, edge + 1}
    counts |= set(range(4096, 8193, 512)) | set(range(8192, 32769, 2048))
    counts |= {32768 * 2**i + half for i in range(12) for half in (0, 16384 * 2**i)}
    return _upto(counts, most)


def _upto(values: Iterable[int], most: int) -> list[int]:
    return sorted({v for v in values if v < most} | {most})


def _pairs(**columns: list[int] | list[str]) -> pd.DataFrame:
    return pd.MultiIndex.from_product(columns.values(), names=list(columns)).to_frame(index=False)


def put_table(root: Path, path: str, *rows: dict[str, object]) -> Path:
    file = root / "aiconfigurator" / "h100_sxm" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(list(rows)).to_parquet(file)
    return file
