"""From the parts of a source, rows with their origin, to a whole bundle; the device model fills
the gaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Literal

import numpy as np
import pandas as pd

from sarathi_sim.experiments.lab.fit.devices import Origin
from sarathi_sim.profiler.bundle.schema import TABLES, Bundle, BundleError, BundleMeta
from sarathi_sim.profiler.facts.device import DeviceSpec, device_sha256
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ATTENTION, LAYER_GEMMS, ROW_OPS, SENDS
from sarathi_sim.profiler.physics.shard_times import DeviceTimes, rounded_us
from sarathi_sim.profiler.storage.strict import SpecError

#: How a part came about, from the most to the least direct.
Kind = Literal["measured", "combined", "interpolated", "scaled", "modelled"]


@dataclass(frozen=True, eq=False)
class Part:
    """One op's rows: the key columns of its table and ``time_us``.

    ``kind``: ``measured`` as the source has it, ``combined`` from several measured numbers,
    ``interpolated`` over GEMM shapes, ``scaled`` to another head count, or ``modelled`` by a
    calibrated device. ``origin`` is for the reader of ``meta.yaml``.
    """

    rows: pd.DataFrame
    kind: Kind
    origin: str

    def mark(self) -> str:
        """One line for ``meta.yaml``."""
        return f"{self.kind}: {self.origin}"


def half_octaves(rows: pd.DataFrame) -> pd.DataFrame:
    """Messages (num_bytes, time_us) thinned to two sizes an octave, never faster when larger.

    Published small messages scatter by a factor of two; a median over half an octave smooths them.
    Each bin gives its median size and median time; then a running maximum is taken.
    """
    bins = np.floor(2 * np.log2(rows["num_bytes"])).astype(int)
    thin = rows.groupby(bins.to_numpy())[["num_bytes", "time_us"]].median()
    thin["num_bytes"] = thin["num_bytes"].round().astype(int)
    thin["time_us"] = thin["time_us"].cummax()
    return thin.drop_duplicates("num_bytes").reset_index(drop=True)


def listed(names: Iterable[object]) -> str:
    """``a, b, c``; ``none`` for an empty list."""
    return ", ".join(str(name) for name in names) or "none"


@dataclass(frozen=True)
class Publication:
    """Published measurements: their ``name`` on the command line, origin and hardware."""

    name: str
    origin: Origin
    hardware: str
    dtype: Literal["float16", "bfloat16"]
    notes: str = ""


def assemble(
    source: Publication,
    device: DeviceSpec,
    model: ModelSpec,
    tp: int,
    parts: Mapping[str, Part],
) -> Bundle:
    """The bundle of one ``tp`` rank of ``model`` from ``parts`` by op.

    Keys of ``parts`` are the ops of ``linear.csv``, ``attn_prefill``, ``attn_decode``,
    ``all_reduce`` and ``send_recv_<scope>``. For missing ones a run asks the calibrated model of
    ``device``. ``meta.environment`` says of each where it came from.
    Raises BundleError where the source has no GEMM of the model, or where something is
    missing and the device has no calibrated model.
    """
    if all(parts[op].kind == "modelled" for op in LAYER_GEMMS if op in parts):
        shapes = ", ".join(
            f"{op} ({shape.n}, {shape.k})" for op, shape in sorted(model.gemms(tp).items())
        )
        raise BundleError(
            f"{source.name}: this folder has no GEMM of {model.name} at tp {tp} on {device.name}, "
            f"and none near one; (n, k) needed: {shapes}; a run without profiles asks the "
            f"calibrated model of {device.name} for all of it"
        )
    missing = [op for op in wanted_ops(tp) if op not in parts]
    modelled = _modelled(source, device, model, tp, missing) if missing else {}
    marks = {op: part.mark() for op, part in parts.items()} | modelled
    by_kind: dict[str, list[str]] = {}
    for op, mark in marks.items():
        by_kind.setdefault(mark.partition(":")[0], []).append(op)
    meta = BundleMeta(
        device=device.name,
        model=model.name,
        model_spec=model,
        tp=tp,
        source="imported",
        created=date.today().isoformat(),
        generator=f"sarathi-sim import {source.name}",
        dtype=source.dtype,
        notes="; ".join(f"{kind}: {listed(sorted(ops))}" for kind, ops in sorted(by_kind.items()))
        + (f". {source.notes}" if source.notes else ""),
        environment={
            "repository": source.origin.repository,
            "licence": source.origin.licence,
            "hardware": source.hardware,
            **{op: marks[op] for op in wanted_ops(tp) if op in marks},
        },
        device_file_sha256=device_sha256(device.name),
    )
    return Bundle(meta=meta, **_tables(parts))


def wanted_ops(tp: int) -> list[str]:
    """Every op of a whole bundle, in the order of its tables."""
    reduce = ["all_reduce"] if tp > 1 else []
    return [*ROW_OPS, *ATTENTION, *reduce, *sorted(SENDS)]


def _modelled(
    source: Publication, device: DeviceSpec, model: ModelSpec, tp: int, missing: list[str]
) -> dict[str, str]:
    """The marks of ops that the device's calibrated model has; raises if it lacks one."""
    try:
        has = DeviceTimes(device.name, model, tp).provenance()
    except (SpecError, ValueError) as error:
        needed = [op for op in missing if op not in SENDS]
        if not needed:
            return {}  # send_recv may be absent; runs with pipeline stages will say so
        raise BundleError(
            f"{source.name}: has no {listed(needed)} for {model.name} tp {tp} on {device.name}, "
            f"and the device model cannot fill them in: {error}; supply the source's files for "
            f"them, or take a calibrated device with --device"
        ) from None
    origin = f"the calibrated device file of {device.name} ({source.name} has none that fits)"
    return {op: f"modelled: {origin}" for op in missing if op in has}


def _tables(parts: Mapping[str, Part]) -> dict[str, pd.DataFrame]:
    linear = [parts[op].rows.assign(op=op) for op in ROW_OPS if op in parts]
    messages = [parts[op].rows.assign(scope=scope) for op, scope in SENDS.items() if op in parts]
    found = {
        "linear": pd.concat(linear, ignore_index=True),
        **{op: parts[op].rows if op in parts else _none(op) for op in (*ATTENTION, ALL_REDUCE)},
        "send_recv": pd.concat(messages, ignore_index=True) if messages else _none("send_recv"),
    }
    return {name: _ordered(name, frame) for name, frame in found.items()}


def _none(name: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(TABLES[name].columns))


def _ordered(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    table = TABLES[name]
    ordered = frame[list(table.columns)].sort_values(list(table.key)).reset_index(drop=True)
    if len(ordered):
        ordered["time_us"] = rounded_us(ordered["time_us"].to_numpy())
    return ordered
