"""The band of a run's makespan: its schedule re-timed under joint op errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from sarathi_sim.profiler.facts.ops import OPS, PARTS
from ..loop.records import Floats, Ints, Records
from ..views.explain import OpUse, distinct_sizes
from ..views.ledger import Spans
from .op_errors import (
    OCTAVES,
    LayerError,
    OpError,
    standard_normals,
)
from .retime import Extra, retimed_finish
from .retime_steps import Steps

Errors = Mapping[str, OpError | LayerError]

SAMPLES = 64
"""Joint draws of the op errors: the ends of a 90 % band then vary by about a tenth of its width."""

STAGES_AT_ONCE = 512
"""Stages, over all replicas, whose durations are laid out together: about 0.3 GB."""

WHOLE_LAYER = "whole_layer"
"""The name, among the op errors, of the error of a layer beyond its ops."""


class _Perturbed:
    """The changes of the recorded times of one replica's iterations by op errors. All sizes of an
    op in one octave share one relative error in each sample. Each (op, octave) is a column of a
    table of times; its product with the table of errors gives the added times."""

    def __init__(self, uses: Mapping[str, OpUse], errors: Errors, key: str) -> None:
        self._ops: list[list[tuple[Floats, Ints]]] = [[] for _ in PARTS]
        tables: list[list[Floats]] = [[] for _ in PARTS]
        shared: dict[tuple[int, bytes], tuple[Floats, Ints]] = {}
        for op, use in uses.items():
            used = use.time_s > 0
            if op not in errors or not used.any():
                continue
            rows = (id(use.size), used.tobytes())  # the same for most ops
            if rows not in shared:
                shared[rows] = distinct_sizes(use.size[used])
            distinct, which = shared[rows]
            seconds = np.bincount(which, use.time_s[used])
            known = OPS.get(op)  # None: a whole layer
            decoding = known is not None and known.family == "decode"
            size = distinct.prod(axis=1) if decoding else distinct[:, 0]
            octaves = np.minimum(np.log2(np.maximum(size, 1)).astype(np.int64), OCTAVES - 1)
            present, index = np.unique(octaves, return_inverse=True)
            # One standard deviation an octave: of its sizes, weighted by the time spent in each.
            weighted = np.bincount(index, seconds * errors[op].sigmas(distinct))
            sigma = weighted / np.bincount(index, seconds)
            normal = standard_normals(f"{key} {op}", SAMPLES)
            part = PARTS.index(known.part if known else "layer")
            column = np.zeros(len(used), np.int64)
            column[used] = len(tables[part]) + index[which]
            alike = errors[op].common * normal[0] - errors[op].slow * np.maximum(normal[0], 0)
            error = alike + sigma[:, None] * normal[1 + present]
            tables[part].extend(np.expm1(error))
            self._ops[part].append((use.time_s, column))
        self._tables = [np.reshape(table, (len(table), SAMPLES)) for table in tables]

    def added_s(self, times: Mapping[str, int]) -> Floats:
        """Seconds added to all iterations together in each sample; what is added to a part counts
        so many ``times``."""
        found = np.zeros(SAMPLES)
        for part, ops, table in zip(PARTS, self._ops, self._tables, strict=True):
            for time_s, column in ops:
                added = np.bincount(column, time_s, len(table)) @ table
                found += times.get(part, 0) * added
        return found

    def __call__(self, rows: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds added to layer, first stage, last stage and transfer; (rows, samples) each."""
        added = []
        here = np.arange(len(rows))
        for ops, table in zip(self._ops, self._tables, strict=True):
            times = np.zeros((len(rows), len(table)))
            for time_s, column in ops:
                times[here, column[rows]] += time_s[rows]
            added.append(times @ table)
        return added[0], added[1], added[2], added[3]


def _added(
    perturbed: Sequence[_Perturbed], replica: int, rows: Ints
) -> tuple[Floats, Floats, Floats, Floats]:
    return perturbed[replica](rows)


def op_time_samples(
    uses: Sequence[Mapping[str, OpUse]], errors: Errors, key: str, num_layers: int
) -> Floats:
    """The time of all ops in the iterations of these replicas, over the predicted one, under each
    of :data:`SAMPLES` joint draws of the op errors. Transfers between stages are left out. ``uses``
    and ``key`` are those of :func:`makespan_samples`."""
    times = {"layer": num_layers, "first": 1, "last": 1}
    added, total = np.zeros(SAMPLES), 0.0
    for used in uses:
        added += _Perturbed(used, errors, key).added_s(times)
        for op, use in used.items():
            part = OPS[op].part if op in OPS else "layer"  # a whole layer
            total += times.get(part, 0) * float(use.time_s.sum())
    return 1 + added / total if total else np.ones(SAMPLES)


def makespan_samples(
    records: Records,
    spans: Sequence[Spans],
    uses: Sequence[Mapping[str, OpUse]],
    errors: Errors,
    key: str,
) -> Floats:
    """The makespan in seconds under each of :data:`SAMPLES` joint draws of the op errors.

    ``uses`` are the replicas' :func:`~sarathi_sim.simulator.views.explain.breakdown` (those of
    idle ones may be empty); ``key`` names the bundle. Runs on the same bundle get the same draws.
    Replicas do not wait for each other, so they are re-timed some at a time, which bounds the
    memory; the ranks of one do, so its steps are re-timed.
    """
    at_work = [number for number, log in enumerate(records.replicas) if log.num_iterations]
    together = max(1, STAGES_AT_ONCE // records.replicas[0].num_stages)
    if (ranks := records.ranks[0]) > 1:  # two pools have no band
        together = ranks
        at_work = list(range(len(records.replicas)))
    ends = np.full(SAMPLES, -np.inf)
    for begin in range(0, len(at_work), together):
        part = at_work[begin : begin + together]
        logs = [records.replicas[number] for number in part]
        perturbed = [_Perturbed(uses[number], errors, key) for number in part]
        its_spans = [spans[number] for number in part]
        extra: Extra = partial(_added, perturbed)
        if ranks > 1:
            if not any(log.num_iterations for log in logs):
                continue
            steps = Steps(logs, its_spans)
            logs, its_spans = [steps.log], [steps.spans]
            extra = partial(steps.extra, extra)
        finish = retimed_finish(
            replace(records, replicas=logs),
            its_spans,
            extra,
            SAMPLES,
            [np.array([log.num_iterations - 1]) for log in logs],
        )
        np.maximum(ends, np.concatenate(finish).max(axis=0), out=ends)
    return np.asarray(ends - records.arrival_s.min())
