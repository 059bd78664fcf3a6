"""The settings of a profile; the points to measure; and the journal of measured ones. No torch.

Chosen beforehand are the coarse grid of each op, whole layers of mixed batches, and decodes of
unequal contexts. The next point of a :class:`Grid` is where the fit through the points so far may
have its largest error: every point beyond the coarse ones is predicted from its neighbours before
it is measured. So its error is a held-out one, and decides when to stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..facts.formats import Distribution, Kernels
from ..facts.model import ModelSpec
from ..facts.ops import ATTENTION, OPS
from ..facts.roofline import decode_terms
from ..storage.folder_lock import FolderBusyError, FolderLock
from ..storage.strict import UserError

Key = tuple[int, ...]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Proposal:
    """The next point of a grid; ``score`` is its expected worth, for comparison with other ops."""

    key: Key
    score: float


class Grid:
    """Points of one op, and the next one to measure. ``target`` is the held-out error (a fraction)
    to reach. ``held_out`` are the errors of the points added, as fractions of their times, noise
    taken off; ``noise`` is the relative spread of each."""

    def __init__(self, target: float) -> None:
        self.held_out: list[float] = []
        self.noise: list[float] = []
        self._target = target
        self._skipped: set[Key] = set()

    def propose(self) -> Proposal | None:
        """The next point, or None where the target is met everywhere."""
        raise NotImplementedError

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point; ``noise`` is its relative spread, which is not an error of the
        fit."""
        raise NotImplementedError

    def skip(self, key: Key) -> None:
        """Never propose ``key`` again (it does not fit in memory, say)."""
        self._skipped.add(key)

    def _book(self, guess: float, time: float, noise: float) -> float:
        error = max(0.0, abs(guess - time) / time - noise)
        self.held_out.append(error)
        self.noise.append(noise)
        return error


class SizeGrid(Grid):
    """Times over one size, piecewise linear between the points.

    The next point halves the interval with the largest relative step between its ends, times the
    root of its length: bisection finds a step, and wide intervals are visited, too. An interval is
    finished if its ends are within ``target`` of each other, or if its last :data:`LOOKS` points
    were on the line (a single one may be so by accident, between a step up and a step down).

    ``coarse`` are the points to start from, ``resolution`` the finest interval to halve, as a
    fraction of the size (0: single tokens).
    """

    LOOKS = 2

    def __init__(self, coarse: Mapping[Key, float], target: float, resolution: float = 0.0) -> None:
        super().__init__(target)
        self._resolution = resolution
        self._time = {key[0]: time for key, time in coarse.items()}
        self._good_looks: dict[tuple[int, int], int] = {}  # of an interval, one after the other

    def propose(self) -> Proposal | None:
        """The middle of the interval most likely to hide a step, or None."""
        sizes = sorted(self._time)
        best: Proposal | None = None
        for low, high in pairwise(sizes):
            middle = (low + high) // 2
            step = abs(self._time[high] / self._time[low] - 1)
            too_fine = high - low <= max(1.0, self._resolution * low)
            content = step <= self._target or self._good_looks.get((low, high), 0) >= self.LOOKS
            if too_fine or content or (middle,) in self._skipped:
                continue
            score = step * float(np.sqrt((high - low) / sizes[-1]))
            if best is None or score > best.score:
                best = Proposal((middle,), score)
        return best

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point, which lies between two earlier ones."""
        size = key[0]
        sizes = sorted(self._time)
        index = int(np.searchsorted(sizes, size))
        low, high = sizes[index - 1], sizes[index]
        at_low, at_high = self._time[low], self._time[high]
        guess = at_low + (at_high - at_low) * (size - low) / (high - low)
        error = self._book(guess, time, noise)
        self._time[size] = time
        looks = self._good_looks.get((low, high), 0) + 1 if error <= self._target else 0
        self._good_looks[low, size] = self._good_looks[size, high] = looks


class Surface(Grid):
    """Times over two sizes: physical terms, times a ratio that is linear in each triangle.

    A triangle has the error of the point measured in it last (a coarse one: half the range of the
    ratio at its corners, and never less than would get it one look); the next point goes where
    error times area (in octaves) is largest. ``terms(a, b)`` gives the physical terms, shape
    (points, terms); ``allowed(key)`` says which points exist. Sizes enter as logarithms, the second
    one shifted by 32 so that 0 is a size like others.
    """

    SHIFT = 32

    def __init__(
        self,
        coarse: Mapping[Key, float],
        target: float,
        terms: Callable[[Floats, Floats], Floats],
        allowed: Callable[[Key], bool],
    ) -> None:
        super().__init__(target)
        self._terms = terms
        self._allowed = allowed
        self._keys = list(coarse)
        self._times = list(coarse.values())
        self._skipped = set(coarse)
        self._error: list[float | None] = [None] * len(self._keys)
        self._refit()

    def _refit(self) -> None:
        from scipy.optimize import nnls
        from scipy.spatial import Delaunay, QhullError

        times = np.asarray(self._times)
        terms = self._of(self._keys)
        scaled = terms / times[:, None]
        unit = scaled.max(axis=0)
        self._coefficients = nnls(scaled / unit, np.ones(len(times)))[0] / unit
        self._ratio = times / (terms @ self._coefficients)
        self._points = np.array([self._coordinates(key) for key in self._keys])
        try:
            self._mesh = Delaunay(self._points)
        except (QhullError, ValueError):  # too few points, or all on one line
            self._mesh = None

    def _of(self, keys: list[Key]) -> Floats:
        sizes = np.asarray(keys, dtype=np.float64)
        return self._terms(sizes[:, 0], sizes[:, 1])

    def _coordinates(self, key: Key) -> tuple[float, float]:
        return float(np.log2(key[0])), float(np.log2(key[1] + self.SHIFT))

    def propose(self) -> Proposal | None:
        """The centre of the triangle with the largest error times area, or None."""
        if self._mesh is None:
            return None
        best: Proposal | None = None
        for corners in self._mesh.simplices:
            coordinates = self._points[corners]
            error = self._triangle_error(corners)
            edges = coordinates[1:] - coordinates[0]
            area = abs(float(edges[0, 0] * edges[1, 1] - edges[0, 1] * edges[1, 0])) / 2
            centre = 2.0 ** coordinates.mean(axis=0)
            key = (round(float(centre[0])), max(0, round(float(centre[1])) - self.SHIFT))
            known = key in self._skipped or not self._allowed(key)
            if not known and error > self._target and (best is None or error * area > best.score):
                best = Proposal(key, error * area)
        return best

    def _triangle_error(self, corners: npt.NDArray[np.int32]) -> float:
        newest = int(corners.max())
        error = self._error[newest]
        if error is not None:
            return error
        # Nothing measured inside yet: how much the ratio varies over the corners.
        ratio = self._ratio[corners]
        return max(float(ratio.max() - ratio.min()) / 2, self._target * 1.01)

    def _guess(self, key: Key) -> float:
        physical = float((self._of([key]) @ self._coefficients)[0])
        coordinates = np.array([self._coordinates(key)])
        triangle = -1 if self._mesh is None else int(self._mesh.find_simplex(coordinates)[0])
        if self._mesh is None or triangle < 0:
            nearest = int(np.argmin(((self._points - coordinates) ** 2).sum(axis=1)))
            return physical * float(self._ratio[nearest])
        affine = self._mesh.transform[triangle]
        share = affine[:2] @ (coordinates[0] - affine[2])
        weights = np.append(share, 1 - share.sum())
        return physical * float(weights @ self._ratio[self._mesh.simplices[triangle]])

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point."""
        error = self._book(self._guess(key), time, noise)
        self._keys.append(key)
        self._times.append(time)
        self._error.append(error)
        self._skipped.add(key)
        self._refit()


class ProfileError(UserError):
    """A device or setting that cannot be profiled; the message says why and what to do."""


@dataclass(frozen=True)
class Timing:
    """One measured point.

    ``time_us`` is the median, ``spread`` the interquartile range over it, ``samples`` how many were
    timed, ``preempted`` in how many of them another process had the core for a while, or a GPU
    waited for its host, ``seconds`` what measuring took in all. ``time_us`` is None for a point
    that was skipped or failed, and ``note`` then says why; ``lost`` whether the GPU did no more for
    this process after it. ``kernel`` is what computed attention, where that is known of the point.
    The rest is the GPU's state meanwhile (profiler/shard/timing.py).
    """

    time_us: float | None
    spread: float = 0.0
    samples: int = 0
    preempted: int = 0
    seconds: float = 0.0
    note: str = ""
    lost: bool = False
    kernel: str = ""
    clock_mhz: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttle: str = ""


def relative_iqr(samples: list[float]) -> float:
    """Interquartile range over the median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of everything that a point's time depends on."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Journal:
    """JSON lines, one per point, flushed to the disk before the next point begins.

    ``folder`` is made, and held until :meth:`close`; the file in it is named after
    :func:`settings_hash`, so points measured with other settings are never mixed in. A last line
    cut short by a crash is dropped. Raises ProfileError where another process holds the folder, and
    for any other line that is no point.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            self._lock = FolderLock(folder)
        except FolderBusyError as holder:
            raise ProfileError(
                f"{folder}: {holder} is measuring the same bundle; wait for it or stop it (its "
                "points are kept), or name another --out or --set device_name"
            ) from None
        self.path = folder / f"{settings_hash(settings)}.jsonl"
        self._points: dict[tuple[str, Key], Timing] = {}
        self._file = self.path.open("ab")
        try:
            self._file.truncate(self._read())
        except ProfileError:
            self.close()
            raise

    def _read(self) -> int:
        """Fill the points; returns the length in bytes of the whole lines."""
        content = self.path.read_bytes()
        *lines, cut = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                op, key, timing = _point(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ProfileError(
                    f"{self.path}: row {number} is damaged: {line[:60]!r}; remove this line to "
                    "measure its point again, or the file to measure all points again"
                ) from None
            self._points[op, key] = timing
        return len(content) - len(cut)

    def __len__(self) -> int:
        return len(self._points)

    def get(self, op: str, key: Key) -> Timing | None:
        """A finished point, or None."""
        return self._points.get((op, key))

    def points(self, op: str) -> dict[Key, Timing]:
        """The finished points of one op, the skipped ones included, in the order of measuring."""
        return {key: timing for (name, key), timing in self._points.items() if name == op}

    def add(self, op: str, key: Key, timing: Timing) -> None:
        """Book a finished point; it is on the disk when this returns."""
        line = json.dumps({"op": op, "key": list(key), **vars(timing)}) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._points[op, key] = timing

    def close(self) -> None:
        """Close the file and release the folder; the points stay."""
        self._file.close()
        self._lock.release()

    def remove(self) -> None:
        """Delete the file, and its folder if no other settings' points are in it."""
        self._file.close()
        self.path.unlink()
        self._lock.remove()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


def _point(line: bytes) -> tuple[str, Key, Timing]:
    """Op, key and timing of one line. Raises ValueError, KeyError, TypeError or AttributeError."""
    entry = json.loads(line)
    op, key = str(entry.pop("op")), tuple(int(size) for size in entry.pop("key"))
    timing = Timing(**entry)
    if timing.time_us is not None and not 0 < timing.time_us < math.inf:
        raise ValueError("no time")
    if not 0 <= timing.spread < math.inf:
        raise ValueError("no spread")
    return op, key, timing


TILE = 128
#: The attention backend: xformers where it works, else SDPA's flash or efficient kernel; or one
#: and nothing else: cudnn is SDPA's cuDNN kernel, fa3 FlashAttention 3 in SDPA.
AttentionChoice = Literal["auto", "xformers", "sdpa", "cudnn", "fa3"]
#: How the L2 of a GPU is made cold before each sample; see profiler/shard/timing.py.
FlushMode = Literal["write", "read", "rotate"]


@dataclass(frozen=True)
class Limits:
    """The largest sizes to measure. ``max_tokens``: tokens of a batch (linear ops).
    ``max_context``: chunk + cached tokens of one sequence. ``max_batch``: sequences of a decode
    batch, and rows of the LM head."""

    max_tokens: int
    max_context: int
    max_batch: int


@dataclass(frozen=True)
class Settings:
    """The settings of a profile.

    ``target`` is the held-out error (a fraction) at which the adaptive grid stops, ``budget_s`` the
    seconds for all of ``tps`` together after which it stops anyway (the coarse grid is always
    measured whole). ``inter_node`` is a file of :mod:`sarathi_sim.profiler.measuring.ranks`.
    ``collectives`` is a bundle (or the folder of its tp<k>) to take the collectives from.
    ``force`` replaces bundles that were measured already. ``ops`` are all that is measured, if any
    are named: the journal keeps them, and a run without completes the bundle. ``weights``: the
    number format of the layer's GEMMs. ``expert_distribution``: how tokens spread over a mixture's
    experts. ``max_s`` are seconds after which nothing more is measured at all. ``sustained_s``: how
    long a layer is run without a pause, on a GPU.
    """

    model: ModelSpec
    tps: tuple[int, ...]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float16", "bfloat16", "float32"]
    out: Path
    limits: Limits
    device_name: str | None = None
    budget_s: float = 60.0
    target: float = 0.03
    repeats: int = 5
    threads: int = 1
    inter_node: Path | None = None
    collectives: Path | None = None
    attention: AttentionChoice = "auto"
    force: bool = False
    weights: Literal["dtype", "fp8"] = "dtype"
    expert_distribution: Distribution = Kernels.expert_distribution
    flush: FlushMode = "read"
    ops: tuple[str, ...] = ()
    max_s: float = math.inf
    sustained_s: float = 20.0

    @property
    def local_ops(self) -> tuple[str, ...]:
        """The ops that one rank of the model computes alone."""
        return (*self.model.row_ops, *ATTENTION)


def default_limits(device: str, max_position: int) -> Limits:
    """For a device type ("cpu", "cuda") and a model's longest sequence."""
    if device == "cpu":
        return Limits(max_tokens=1024, max_context=min(2048, max_position), max_batch=32)
    return Limits(max_tokens=8192, max_context=min(8192, max_position), max_batch=256)


def coarse_grid(op: str, limits: Limits) -> list[Key]:
    """The points to start from, ascending; every op's largest one is among them."""
    if OPS[op].family == "prefill":
        half = limits.max_context // 2  # so that long chunks have a long context too
        chunks = _upto([16, 64, 128, 256, 512, half, *_doubling(1024)], limits.max_context)
        contexts = [0, *_upto([128, 512, half, *_doubling(1024)], limits.max_context)]
        grid = [(n, c) for n in chunks for c in contexts]
        return [key for key in grid if allowed(op, key, limits)]
    if OPS[op].family == "decode":
        batches = _upto([1, 2, 4, 8, 16, *_doubling(32)], limits.max_batch)
        contexts = _upto([16, 128, 512, *_doubling(1024)], limits.max_context - 1)
        return [(batch, context) for batch in batches for context in contexts]
    # The first sizes one by one: small matrices take anything but monotone times on a CPU.
    sizes = [*range(1, 9), 12, 16, 24, 32, 48, 64, 96]
    edges = [k * TILE for k in range(1, 17)] + _doubling(32 * TILE)
    return [
        (m,) for m in _upto(sizes + edges + [edge + 1 for edge in edges], _most_rows(op, limits))
    ]


def allowed(op: str, key: Key, limits: Limits) -> bool:
    """Whether the point lies within the limits."""
    family = OPS[op].family
    if family == "prefill":
        return sum(key) <= limits.max_context
    if family == "decode":
        return key[0] <= limits.max_batch and key[1] < limits.max_context
    return key[0] <= _most_rows(op, limits)


def _most_rows(op: str, limits: Limits) -> int:
    return limits.max_batch if OPS[op].outputs else limits.max_tokens


def _doubling(first: int) -> list[int]:
    return [first * 2**i for i in range(12)]


def _upto(sizes: list[int], most: int) -> list[int]:
    return sorted({size for size in sizes if size < most} | {most})


def make_grid(
    op: str, coarse: dict[Key, float], target: float, limits: Limits, resolution: float
) -> Grid:
    """The adaptive grid of one op over its measured coarse points."""
    family = OPS[op].family
    if family == "prefill":
        return Surface(coarse, target, _prefill_terms, lambda key: allowed(op, key, limits))
    if family == "decode":
        return Surface(coarse, target, decode_terms, lambda key: allowed(op, key, limits))
    return SizeGrid(coarse, target, resolution)


def _prefill_terms(chunk: Floats, context: Floats) -> Floats:
    """Launch; rows; KV read and written; query-key pairs under the causal mask, and without."""
    pairs = chunk * (context + (chunk + 1) / 2)
    full = chunk * (context + chunk)
    return np.stack(
        [
            np.ones_like(chunk),
            chunk,
            chunk + context,
            pairs,
            full,
        ],
        axis=-1,
    )


#: Journal and table name of each.
DESIGNED = SKEWED, MIXED = "attn_decode_skew", "mixed"


def designed_points(op: str, limits: Limits) -> list[Key]:
    """The points of one of DESIGNED, ascending, all within the limits."""
    return sorted(set(_mixed(limits) if op == MIXED else _skewed(limits)))


def _mixed(limits: Limits) -> list[Key]:
    """Keys (chunk, context, batch, decode context); a chunk and its decodes fill a tile.

    Half of all combinations, each level of one size with each of any other; and the layers of the
    chunks alone and of the decodes alone, which separate an interaction from a layer that is not
    the sum of its ops.
    """
    most = limits.max_context
    totals = _powers(64, 2, min(limits.max_tokens, most // 2) // 2)
    contexts = (0, most // 2)
    batches = [n for n in _powers(2, 4, limits.max_batch) if n < totals[-1]]
    held = [max(1, most // 16), most // 2]
    found: list[Key] = []
    for levels in product(*(range(len(sizes)) for sizes in (totals, contexts, batches, held))):
        total, context = totals[levels[0]], contexts[levels[1]]
        batch, decode_context = batches[levels[2]], held[levels[3]]
        if sum(levels) % 2 == 0 and total > batch:
            found.append((total - batch, context, batch, decode_context))
    alone = [(total, context, 0, 0) for total in totals for context in contexts]
    return found + alone + [(0, 0, batch, context) for batch in batches for context in held]


def _skewed(limits: Limits) -> list[Key]:
    """Keys (batch, mean context, longest): moderate, strong, and one that has nearly all."""
    most = limits.max_context - 1
    found: list[Key] = []
    for batch in _powers(4, 4, limits.max_batch):
        for mean in sorted({max(4, limits.max_context // 16), max(4, limits.max_context // 4)}):
            longest = (3 * mean // 2, 3 * mean, 9 * batch * mean // 10)
            possible = min(most, batch * mean)
            found += [(batch, mean, size) for size in longest if mean < size <= possible]
    return found


def _powers(first: int, factor: int, most: int) -> list[int]:
    """``first``, ``first * factor``, ... below ``most``, and ``most`` itself (at least 1)."""
    sizes = [first * factor**i for i in range(12)]
    return sorted({size for size in sizes if size < most} | {max(1, most)})


def skewed_contexts(batch: int, mean: int, longest: int) -> list[int]:
    """Contexts that fall geometrically from ``longest`` and add up to ``batch * mean``. The nearer
    ``longest`` is to the sum, the more it becomes one long sequence and many short ones. Raises
    ValueError where no such contexts exist."""
    if not mean <= longest <= batch * mean:
        raise ValueError(f"no {batch} contexts have the mean {mean} and the maximum {longest}")
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        total = sum(longest * ratio**i for i in range(batch))
        low, high = (ratio, high) if total < batch * mean else (low, ratio)
    # Rounding the running sum keeps the total, and moves each context by less than one.
    sums = [round(value) for value in accumulate(longest * high**i for i in range(batch))]
    return [sums[0], *(after - before for before, after in pairwise(sums))]
