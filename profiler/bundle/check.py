"""Checks of a bundle's plausibility: times that are impossible or faster than the device's data
sheet allows, and suspicious points, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from ..facts.device import DeviceSpec, shipped_device
from ..facts.formats import SPEEDUP, Kernels
from ..facts.ops import ALL_REDUCE, ATTENTION, LAYER_GEMMS, OPS, SEND_RECV
from ..facts.roofline import HALF, Array
from .schema import TABLES, Bundle, BundleError, load_bundle
from .tables import UNLABELLED, BundleTable

#: Clocks above the data sheet's, and rounding, are forgiven.
_SLACK = 1.05
#: Below this traffic a profiling loop may find its data in L2 (at most 50 MB here) again.
_FROM_MEMORY = 200e6
#: Largest ratio of L2's bandwidth to HBM's.
_L2_SPEEDUP = 6.0


def too_fast(bundle: Bundle, device: DeviceSpec) -> Iterator[tuple[str, str]]:
    """(op, message) of every row that is faster than ``device`` can compute or move bytes. GEMMs,
    attention and whole layers: peak FLOP/s, and HBM bandwidth where the traffic exceeds what L2
    could hold. Messages: the link's bandwidth in one direction. Wrong units show up here."""
    model, tp = bundle.meta.model_spec, bundle.meta.tp
    plain = Kernels(
        "vllm", dtype="fp8" if bundle.meta.environment.get("weights") == "fp8" else "bf16"
    )
    kernels = bundle.meta.kernels.used if bundle.meta.kernels else plain
    sizes_of = kernels.number_bytes
    for gemm, shape in model.gemms(tp).items():
        rows = bundle.linear[bundle.linear["op"] == gemm]
        m = rows["num_tokens"].to_numpy(np.float64)
        own = OPS[gemm].part == "layer"
        weight, faster = (sizes_of.weight, SPEEDUP[kernels.dtype]) if own else (HALF, 1.0)
        moved = weight * (shape.n * shape.k + m * shape.k) + HALF * m * shape.n
        flops = 2.0 * m * shape.n * shape.k / faster
        yield from _flops(gemm, rows, "num_tokens", flops, device)
        yield from _memory(gemm, rows, "num_tokens", moved, device)
    tables = [(op, OPS[op]) for op in ATTENTION]
    tables += [(f"{name}_skew", op) for name, op in tables if op.family == "decode"]
    for table, op in tables:
        rows, size = bundle.tables()[table], op.columns[0]
        new = rows[size].to_numpy(np.float64)
        context = rows["context_tokens"].to_numpy(np.float64)
        decoding = op.family == "decode"
        # At least the tokens that are attended to; an indexer's keys come on top.
        reach = model.indexer.top_k if model.indexer else np.inf
        kept = np.minimum(model.kept_tokens(context), reach)
        pairs = new * kept if decoding else model.pairs(new, context, edge=0.0)
        flops = model.attention_flops_per_pair * pairs / tp / (HALF / sizes_of.kv)
        yield from _flops(table, rows, size, flops, device)
        read = new * kept if decoding else new + kept
        moved = model.cached_bytes(tp, sizes_of.kv) * read
        yield from _memory(table, rows, size, moved, device)
    tokens = bundle.mixed["chunk_tokens"] + bundle.mixed["batch_size"]
    flops = 2.0 * model.layer_weights(tp) * tokens.to_numpy(np.float64)
    yield from _flops("mixed", bundle.mixed, "chunk_tokens", flops, device)
    sizes = bundle.all_reduce["num_bytes"].to_numpy(np.float64)
    # Every rank sends and receives 2 (tp - 1) / tp of the tensor in a ring; switches may halve it.
    yield from _link(ALL_REDUCE, bundle.all_reduce, sizes * (tp - 1) / tp, device, "intra_node")
    for scope, rows in bundle.send_recv.groupby("scope"):
        sizes = rows["num_bytes"].to_numpy(np.float64)
        yield from _link(f"send_recv {scope}", rows, sizes, device, str(scope))


def _flops(
    op: str, rows: pd.DataFrame, size: str, flops: Array, device: DeviceSpec
) -> Iterator[tuple[str, str]]:
    least = 1e6 * flops / (device.peak_flops * _SLACK)
    yield from _compare(op, rows, size, least, f"{device.peak_flops / 1e12:.0f} TFLOP/s", device)


def _memory(
    op: str, rows: pd.DataFrame, size: str, moved: Array, device: DeviceSpec
) -> Iterator[tuple[str, str]]:
    speed = np.where(moved > _FROM_MEMORY, _SLACK, _L2_SPEEDUP) * device.memory_bandwidth
    limit = f"{device.memory_bandwidth / 1e9:.0f} GB/s of memory"
    yield from _compare(op, rows, size, 1e6 * moved / speed, limit, device)


def _link(
    op: str, rows: pd.DataFrame, moved: Array, device: DeviceSpec, scope: str
) -> Iterator[tuple[str, str]]:
    link = device.intra_node if scope == "intra_node" else device.inter_node
    least = 1e6 * moved / (link.bandwidth * _SLACK)
    limit = f"{link.bandwidth / 1e9:.4g} GB/s of {link.kind}"
    yield from _compare(op, rows, "num_bytes", least, limit, device)


def _compare(
    op: str, rows: pd.DataFrame, size: str, least: Array, limit: str, device: DeviceSpec
) -> Iterator[tuple[str, str]]:
    times = rows["time_us"].to_numpy(np.float64)
    wrong = np.flatnonzero(times < least)
    if not len(wrong):
        return
    worst = wrong[np.argmax(least[wrong] / times[wrong])]
    row = rows.iloc[worst]
    at = f"{size}={int(row[size])}"
    if "context_tokens" in rows:
        at += f" context_tokens={int(row['context_tokens'])}"
    yield (
        op,
        f"faster than the device can: {times[worst]:.4g} us at {at}, where {limit} of "
        f"{device.name} need at least {least[worst]:.4g} us ({len(wrong)} of {len(rows)} rows); "
        "wrong unit or shape?",
    )


#: A larger drop of the time, as a share, from one size to the next is reported.
DROP = 0.10
#: A point this far from the line between its neighbours, and outside them, is an outlier.
OFF = 0.40
#: A point is reported unless half of its samples lie within this share of its median.
SCATTER_PCT = 20.0
#: From one size to the next a time grows by at most this times the square of the size's growth, and
#: falls at most by this factor: else the measurement is impossible.
IMPOSSIBLE = 100.0
#: Points named in one message; the others are counted.
_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """A finding about a bundle. ``where`` is a table or an op."""

    level: Literal["error", "warning", "note"]
    where: str
    message: str


@dataclass(frozen=True, eq=False)
class Checked:
    """A bundle, its content by op, and the findings."""

    bundle: Bundle
    coverage: dict[str, str]
    findings: list[Finding]

    @property
    def failed(self) -> bool:
        """Whether anything is an error."""
        return any(finding.level == "error" for finding in self.findings)


def load_plausible(path: Path) -> Bundle:
    """The bundle in a folder, with none of the errors that :func:`check_folder` finds. Raises
    BundleError with them otherwise, and what :func:`load_bundle` raises."""
    checked = check_folder(path)
    errors = [f"{f.where}: {f.message}" for f in checked.findings if f.level == "error"]
    if errors:
        raise BundleError(f"{path} cannot be right: {'; '.join(errors)}")
    return checked.bundle


def check_folder(path: Path) -> Checked:
    """Load a bundle and check it. Raises what :func:`load_bundle` raises."""
    bundle = load_bundle(path)
    device = shipped_device(bundle.meta.device, str(bundle.meta.environment.get("gpu", "")))
    return Checked(bundle, _coverage(bundle), check_bundle(bundle, device))


def check_bundle(bundle: Bundle, device: DeviceSpec | None) -> list[Finding]:
    """All findings on a loaded bundle. Without a device its limits are not checked (a note)."""
    found: list[Finding] = []
    for series in _series(bundle):
        found += _impossible(series)
        found += _drops(series)
        found += _outliers(series)
    found += _edges(bundle)
    for name, table in TABLES.items():
        found += _scatter(table, name, bundle.tables()[name])
        found += _backends(table, name, bundle.tables()[name])
    if device is None:
        unknown = f"no data sheet of {bundle.meta.device} ships: limits of the device unchecked"
        found.append(Finding("note", "device", unknown))
    else:
        found += [Finding("error", where, text) for where, text in too_fast(bundle, device)]
    return _together(found)


@dataclass(frozen=True, eq=False)
class _TimesBySize:
    """Times along one size, everything else fixed (``at``)."""

    op: str
    size: str
    at: str
    sizes: Array
    times: Array

    def name(self, i: np.integer[Any] | int) -> str:
        return f"{self.size}={int(self.sizes[i])}{self.at}"


def _series(bundle: Bundle) -> Iterator[_TimesBySize]:
    for op, rows in bundle.linear.groupby("op"):
        yield _line(str(op), "num_tokens", "", rows)
    for table in UNLABELLED:
        frame, keys = bundle.tables()[table], TABLES[table].key
        if len(keys) == 1:
            yield _line(table, keys[0], "", frame)
            continue
        for along in keys:
            fixed = [key for key in keys if key != along]
            for values, rows in frame.groupby(fixed):
                at = "".join(f" {k}={v}" for k, v in zip(fixed, values, strict=True))
                yield _line(table, along, at, rows)
    for scope, rows in bundle.send_recv.groupby("scope"):
        yield _line(f"send_recv {scope}", "num_bytes", "", rows)


def _line(op: str, size: str, at: str, rows: pd.DataFrame) -> _TimesBySize:
    ordered = rows.sort_values(size)
    sizes, times = (ordered[c].to_numpy(np.float64) for c in (size, "time_us"))
    return _TimesBySize(op, size, at, sizes, times)


def _impossible(series: _TimesBySize) -> Iterator[Finding]:
    sizes = np.maximum(series.sizes, 1.0)
    most = IMPOSSIBLE * series.times[:-1] * (sizes[1:] / sizes[:-1]) ** 2
    least = series.times[:-1] / IMPOSSIBLE
    for i in np.flatnonzero((series.times[1:] > most) | (series.times[1:] < least)):
        text = (
            f"impossible: {series.times[i + 1]:.4g} us at {series.name(i + 1)}, "
            f"after {series.times[i]:.4g} us at {series.name(i)}; wrong unit?"
        )
        yield Finding("error", series.op, text)


def _drops(series: _TimesBySize) -> Iterator[Finding]:
    change = series.times[1:] / series.times[:-1] - 1
    for i in np.flatnonzero(change < -DROP):
        text = f"takes {-100 * change[i]:.0f} % less at {series.name(i + 1)} than just before"
        yield Finding("warning", series.op, text)


def _outliers(series: _TimesBySize) -> Iterator[Finding]:
    if len(series.sizes) < 3:
        return
    low, mid, high = (series.sizes[i : len(series.sizes) - 2 + i] for i in range(3))
    before, time, after = (series.times[i : len(series.times) - 2 + i] for i in range(3))
    expected = before + (after - before) * (mid - low) / (high - low)
    # A step between two sizes is between its neighbours' times, so it is not an outlier.
    above, below = (1 + DROP) * np.maximum(before, after), (1 - DROP) * np.minimum(before, after)
    beyond = (time > above) | (time < below)
    for i in np.flatnonzero(beyond & (np.abs(time / expected - 1) > OFF)):
        text = (
            f"outlier: {time[i]:.4g} us at {series.name(i + 1)}, "
            f"where its neighbours have {expected[i]:.4g}"
        )
        yield Finding("warning", series.op, text)


def _edges(bundle: Bundle) -> Iterator[Finding]:
    """Tile edges up to 1024 tokens that lack a point on either side."""
    tile = bundle.meta.tile
    without: dict[str, int] = {}
    edges = list(range(tile, 1025, tile))
    for op, rows in bundle.linear.groupby("op"):
        tokens = set(rows["num_tokens"])
        inside = [edge for edge in edges if edge < max(tokens)]
        lacking = [edge for edge in inside if not {edge, edge + 1} <= tokens]
        if op in LAYER_GEMMS and lacking:
            without[str(op)] = len(lacking)
    if without:
        ops = ", ".join(f"{op} {count}" for op, count in without.items())
        text = (
            f"of {len(edges)} multiples of {tile} tokens to 1024, these lack a point on one side "
            f"(m, m + 1), so the step there is smeared: {ops}"
        )
        yield Finding("warning", "linear", text)


def _scatter(table: BundleTable, name: str, rows: pd.DataFrame) -> Iterator[Finding]:
    """Points whose samples scatter too much for their median to be trusted, the worst first."""
    if "spread_pct" not in rows:
        return
    wide = rows[rows["spread_pct"] > SCATTER_PCT].sort_values("spread_pct", ascending=False)
    for row in wide.to_dict("records"):
        label = "".join(f"{row[key]}" for key in table.labels)
        at = " ".join(f"{key}={row[key]}" for key in table.key if key not in table.labels)
        where = {"linear": label, SEND_RECV: f"{SEND_RECV} {label}"}.get(name, name)
        text = f"samples scatter by {row['spread_pct']:.3g} % of the median at {at or label}"
        yield Finding("warning", where, text)


def _backends(table: BundleTable, name: str, rows: pd.DataFrame) -> Iterator[Finding]:
    """A table whose points were computed in several ways: between them times may jump."""
    if "backend" not in rows or rows["backend"].nunique() < 2:
        return
    counts = rows["backend"].value_counts()
    parts = []
    for backend, count in counts.items():
        first = rows[rows["backend"] == backend].to_dict("records")[0]
        at = " ".join(f"{key}={first[key]}" for key in table.key)
        parts.append(f"{backend!r} {count} points (first {at})")
    yield Finding("warning", name, f"{len(counts)} backends in one table: {', '.join(parts)}")


def _coverage(bundle: Bundle) -> dict[str, str]:
    found = {}
    for op, rows in bundle.linear.groupby("op"):
        found[str(op)] = f"{len(rows)} points, num_tokens {_range(rows['num_tokens'])}"
    for table in UNLABELLED:
        frame = bundle.tables()[table]
        if len(frame):
            spans = ", ".join(f"{key} {_range(frame[key])}" for key in TABLES[table].key)
            found[table] = f"{len(frame)} points, {spans}"
            if "backend" in frame:
                found[table] += f"; {' and '.join(sorted(frame['backend'].unique()))}"
    for scope, rows in bundle.send_recv.groupby("scope"):
        found[f"send_recv {scope}"] = f"{len(rows)} points, num_bytes {_range(rows['num_bytes'])}"
    if len(bundle.overhead):
        found["overhead"] = ", ".join(bundle.overhead["what"])
    return found


def _range(values: pd.Series[int]) -> str:
    return f"{values.min()}..{values.max()}"


def _together(findings: list[Finding]) -> list[Finding]:
    """One finding per op and kind: the first few in full, the others counted."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        kind = finding.message.split(" ")[0]
        groups.setdefault((finding.level, finding.where, kind), []).append(finding.message)
    joined = []
    for (level, where, _), messages in groups.items():
        more = len(messages) - _NAMED
        text = "; ".join(messages[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
        joined.append(Finding(level, where, text))  # type: ignore[arg-type]
    return joined
