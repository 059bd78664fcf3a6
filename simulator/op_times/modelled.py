"""Op times asked of a stack's tables or of a calibrated device, at every size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.profiler.facts.ops import DECODE, OPS, PREFILL, SENDS
from sarathi_sim.profiler.physics.shard_times import ShardTimes
from sarathi_sim.profiler.storage.files import PACKAGE, files_sha256
from ..loop.records import Floats
from .cache import kept
from .op_times import ALONE, OpTimes, PairTimes, Together

MOST_ROWS = 1 << 17
"""Token rows up to which times are tabulated."""


def modelled_times(source: ShardTimes) -> OpTimes:
    """The op times of ``source``; tables of them are kept on disk (``cache.py``)."""
    meta = source.meta
    identity = f"{meta.content_sha256} {_code()}"
    rows = (op for op in source.provenance() if op in OPS and OPS[op].table == "linear")
    send = {scope: InSeconds(partial(source.send_recv, scope=scope)) for scope in SENDS.values()}
    batches = source.batches
    return OpTimes(
        meta=meta,
        by_rows={
            op: RowTimes(
                InSeconds(partial(source.by_rows, op)),
                identity,
                op,
            )
            for op in rows
        },
        prefill=PairTimes(InSeconds(source.prefill, (1.0, 0.0)), identity, PREFILL),
        decode=PairTimes(InSeconds(source.decode, (1.0, 0.0)), identity, DECODE),
        all_reduce=InSeconds(source.all_reduce) if source.tp > 1 else None,
        send=send,
        together=Together(batches, ChunkShare(source)) if len(batches) else ALONE,
        longest_context=source.longest_context,
        wider=source.wider,
    )


@lru_cache(maxsize=1)
def _code() -> str:
    rooms = ("facts", "physics", "kernels")
    folders = [PACKAGE / "profiler" / room for room in rooms]
    return files_sha256(file for folder in folders for file in sorted(folder.glob("*.py")))


@dataclass(frozen=True, eq=False)
class InSeconds:
    """Seconds from a function that gives microseconds; sizes are raised to ``least``."""

    time_us: Callable[..., Floats]
    least: tuple[float, ...] = (1.0,)

    def __call__(self, *sizes: ArrayLike) -> Floats:
        """Seconds, of the broadcast shape of the sizes."""
        arrays = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in sizes))
        flat = (np.maximum(a.ravel(), low) for a, low in zip(arrays, self.least, strict=True))
        return np.reshape(1e-6 * self.time_us(*flat), arrays[0].shape)


@dataclass(frozen=True, eq=False)
class RowTimes:
    """Times of an op by token rows: whole numbers are looked up, in tables up to a power of two."""

    time: InSeconds
    identity: str
    op: str
    _tables: dict[int, Floats] = field(default_factory=dict)

    def __call__(self, rows: ArrayLike) -> Floats:
        """Seconds, of the shape of ``rows``."""
        wanted = np.asarray(rows)
        whole = wanted.astype(np.int64)
        most = int(whole.max(initial=1024))
        if most > MOST_ROWS or (whole != wanted).any():
            return self.time(rows)
        size = 1 << (most - 1).bit_length()
        if size not in self._tables:
            self._tables[size] = kept(
                self.identity, f"{self.op} {size}", lambda: self.time(np.arange(1, size + 1))
            )
        return np.asarray(self._tables[size][np.maximum(whole, 1) - 1])


@dataclass(frozen=True, eq=False)
class ChunkShare:
    """Seconds that each of several chunks adds to their common call: shape (batches, chunks)."""

    source: ShardTimes

    def __call__(self, chunk: Floats) -> Floats:
        return np.asarray(1e-6 * self.source.added(np.maximum(chunk, 1.0)))
