"""From measured points to a bundle, and from bundles to a device file. No torch."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from ..bundle.schema import (
    Bundle,
    BundleMeta,
    bundle_path,
    list_bundles,
    load_bundle,
)
from ..bundle.tables import OVERHEADS, TABLES, UNLABELLED, BundleTable
from ..facts.device import DeviceSpec, Link
from ..facts.model import ModelSpec
from ..facts.ops import (
    ALL_ROW_OPS,
    ATTENTION,
    MESSAGES,
    OPS,
)
from ..planning.grid import DESIGNED, TILE, Journal, Key, ProfileError, Timing
from ..storage.manifest import replace_files
from ..storage.plain_yaml import dump_yaml

Dtype = Literal["float16", "bfloat16", "float32"]
Facts = dict[str, str | int | float]
DEVICES_KIND = "sarathi-sim devices 1"
_LOCAL = (*ALL_ROW_OPS, *ATTENTION)


def measured_bundle(
    journal: Journal,
    model: ModelSpec,
    tp: int,
    device_name: str,
    dtype: Dtype,
    environment: Facts,
    notes: str,
    inter_node: Mapping[int, Timing],
    backend: str,
) -> Bundle:
    """The bundle of everything in the journal. ``inter_node`` are sends by bytes, ``backend`` names
    the attention kernel."""
    points = {op: measured(journal, op) for op in (*_LOCAL, *UNLABELLED, "send_recv", "overhead")}
    meta = BundleMeta(
        device=device_name,
        model=model.name,
        model_spec=model,
        tp=tp,
        source="measured",
        created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        generator="sarathi-sim profile",
        dtype=dtype,
        tile=TILE,
        environment=environment | spreads(journal),
        notes=notes,
    )
    return Bundle(meta, **tables_of(points, inter_node, backend))


def tables_of(
    points: Mapping[str, Mapping[Key, Timing]],
    inter_node: Mapping[int, Timing] | None = None,
    backend: str = "",
) -> dict[str, pd.DataFrame]:
    """A bundle's tables from the points of each op that have a time."""
    rows: dict[str, Mapping[Any, Timing]] = {name: points.get(name, {}) for name in UNLABELLED}
    rows["linear"] = {
        (op, *key): timing for op in ALL_ROW_OPS for key, timing in points.get(op, {}).items()
    }
    rows["send_recv"] = {
        (*key, "intra_node"): timing for key, timing in points.get("send_recv", {}).items()
    } | {(size, "inter_node"): timing for size, timing in (inter_node or {}).items()}
    rows["overhead"] = {
        (OVERHEADS[index],): timing for (index,), timing in points.get("overhead", {}).items()
    }
    return {name: _frame(TABLES[name], found, backend) for name, found in rows.items()}


def collectives_source(folder: Path, tp: int) -> Bundle:
    """The bundle to take the collectives of ``tp`` ranks from. ``folder`` is that bundle's, or the
    one above with its ``tp<k>``. Raises ProfileError for a bundle of another degree, BundleError
    for one that cannot be used."""
    other = folder / f"tp{tp}" if (folder / f"tp{tp}").is_dir() else folder
    source = load_bundle(other)
    if source.meta.tp != tp:
        raise ProfileError(f"{other}: its all-reduce is over {source.meta.tp} ranks, not {tp}")
    return source


def borrow_collectives(bundle: Bundle, source: Bundle) -> Bundle:
    """``bundle`` with ``all_reduce`` and ``send_recv`` of another one, named in its notes."""
    meta, tp = source.meta, source.meta.tp
    origin = f"all_reduce and send_recv are those of {meta.device}/{meta.model}/tp{tp}"
    notes = f"{bundle.meta.notes}; {origin} ({meta.source})"
    return dataclasses.replace(
        bundle,
        all_reduce=source.all_reduce,
        send_recv=source.send_recv,
        meta=dataclasses.replace(bundle.meta, notes=notes),
    )


def measured(journal: Journal, op: str) -> dict[Key, Timing]:
    """The points of an op that have a time."""
    return {k: t for k, t in journal.points(op).items() if t.time_us is not None}


def _frame(table: BundleTable, points: Mapping[Any, Timing], backend: str) -> pd.DataFrame:
    # Six digits are more than is known.
    rows = [
        (*key, float(f"{timing.time_us or 0.0:.6g}"), round(100 * timing.spread, 3))
        for key, timing in points.items()
    ]
    frame = pd.DataFrame(rows, columns=[*table.columns, "spread_pct"])
    if any(timing.clock_mhz for timing in points.values()):
        frame["power_w"] = [timing.power_w for timing in points.values()]
        frame["sm_clock_mhz"] = [timing.clock_mhz for timing in points.values()]
    if backend and "backend" in table.extras:
        frame["backend"] = [timing.kernel or backend for timing in points.values()]
    return frame.sort_values(list(table.key), ignore_index=True)


def spreads(journal: Journal) -> Facts:
    """Facts in percent: each op's median relative interquartile range; samples preempted."""
    found: Facts = {}
    for op in (*_LOCAL, *DESIGNED, *MESSAGES):
        points = measured(journal, op).values()
        if points:
            median = statistics.median(timing.spread for timing in points)
            found[f"spread_pct_{op}"] = round(100 * median, 2)
    timings = [timing for op in (*_LOCAL, *DESIGNED) for timing in measured(journal, op).values()]
    samples = sum(timing.samples for timing in timings)
    preempted = sum(timing.preempted for timing in timings)
    found["preempted_samples_pct"] = round(100 * preempted / max(1, samples), 1)
    return found


def gpu_facts(journal: Journal) -> Facts:
    """The GPU's state over all points: clocks (MHz), highest temperature, throttling."""
    points = [t for op in (*_LOCAL, *DESIGNED) for t in measured(journal, op).values()]
    clocks = sorted(timing.clock_mhz for timing in points if timing.clock_mhz)
    if not clocks:
        return {}
    found: Facts = {
        "sm_clock_mhz_lowest": clocks[0],
        "sm_clock_mhz_median": clocks[len(clocks) // 2],
        "sm_clock_mhz_highest": clocks[-1],
        "temperature_c_highest": max(timing.temperature_c for timing in points),
    }
    reasons = Counter(reason for t in points if t.throttle for reason in t.throttle.split(", "))
    if reasons:
        share = {reason: f"{reason} {100 * n / len(points):.0f} %" for reason, n in reasons.items()}
        found["slowed_points"] = ", ".join(share[reason] for reason in sorted(share))
    return found


def skipped(journal: Journal) -> list[str]:
    """A message for each point that did not fit or failed."""
    return [
        f"{op} {key if len(key) > 1 else key[0]}: {timing.note}"
        for op in (*_LOCAL, *DESIGNED)
        for key, timing in sorted(journal.points(op).items())
        if timing.time_us is None
    ]


def best_gemm(bundles: list[Bundle]) -> tuple[float, str]:
    """The highest FLOP/s of any GEMM in the bundles, and which it was."""
    best = (0.0, "none")
    for bundle in bundles:
        shapes = bundle.meta.model_spec.gemms(bundle.meta.tp)
        for op in (op for op in shapes if OPS[op].part == "layer"):
            rows = bundle.linear[bundle.linear["op"] == op]
            shape = shapes[op]
            for m, time_us in zip(rows["num_tokens"], rows["time_us"], strict=True):
                rate = 2.0 * int(m) * shape.n * shape.k / (float(time_us) * 1e-6)
                what = f"{op} {int(m)} x {shape.k} x {shape.n} in {bundle.meta.dtype}"
                best = max(best, (rate, what))
    return best


def best_send(bundles: list[Bundle], scope: str) -> float:
    """The highest bytes per second of any message in the bundles; 0 without any."""
    rates = [0.0]
    for bundle in bundles:
        rows = bundle.send_recv[bundle.send_recv["scope"] == scope]
        rates += list(rows["num_bytes"] / (rows["time_us"] * 1e-6))
    return float(max(rates))


def write_device(
    root: Path,
    name: str,
    memory_bytes: float,
    memory_bandwidth: float,
    num_sms: int,
    per_node: int,
    hardware: str,
) -> Path:
    """Write ``root/<name>.yaml``, so that ``run`` can use the measurements; returns its path. The
    peak is that of the best GEMM in any measured bundle of the device under ``root``, links those
    of the fastest message. Raises NotOursError where a file of that name is not ours."""
    found = [key for key in list_bundles(root) if key[0] == name]
    bundles = [load_bundle(bundle_path(root, *key)) for key in found]
    bundles = [bundle for bundle in bundles if bundle.meta.source == "measured"]
    peak, gemm = best_gemm(bundles)
    spec = DeviceSpec(
        name=name,
        memory_bytes=float(memory_bytes),
        reported_bytes=float(memory_bytes),
        peak_flops=float(f"{peak:.4g}"),
        memory_bandwidth=float(f"{memory_bandwidth:.4g}"),
        num_sms=num_sms,
        gpus_per_node=per_node,
        intra_node=_link(best_send(bundles, "intra_node")),
        inter_node=_link(best_send(bundles, "inter_node")),
        notes=(
            f"{hardware}. Measured, not a data sheet: peak_flops is the best GEMM profiled, {gemm};"
            " memory_bandwidth the best large copy (bytes read and written), links the best message"
        ),
    )
    content = "# Written by `sarathi-sim profile`.\n" + dump_yaml(dataclasses.asdict(spec))
    replace_files(root, DEVICES_KIND, {f"{name}.yaml": content.encode()})
    return root / f"{name}.yaml"


def _link(bandwidth: float) -> Link:
    if bandwidth == 0:
        return Link("not measured", 0.0)
    return Link("fastest message measured", float(f"{bandwidth:.4g}"))
