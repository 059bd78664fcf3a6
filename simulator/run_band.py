"""How long a run may have taken: its schedule re-timed under joint op errors."""

from __future__ import annotations

import numpy as np

from simulator.breakdown import OpUse
from simulator.records import Floats, Ints, Records
from simulator.retime import retimed_finish
from simulator.rides import Rides
from simulator.uncertainty import OCTAVES, OpError, standard_normals

SAMPLES = 64
"""Joint draws of the op errors. The ends of a 90 % band then vary by about a tenth of its width."""

LAYER, FIRST, LAST, SEND = range(4)
_PARTS = {"embedding": FIRST, "lm_head": LAST, "send_recv": SEND}


class _Perturbed:
    """What op errors add to the recorded times of one replica's iterations."""

    def __init__(self, uses: dict[str, OpUse], errors: dict[str, OpError], key: str) -> None:
        # Each op's time goes, by octave of its size, into one of few columns; a column times its
        # row of relative errors is what every sample adds.
        self._parts: list[list[tuple[Floats, Ints, Floats]]] = [[] for _ in range(4)]
        for op, use in uses.items():
            if not use.time_s.any():
                continue
            size = np.maximum(use.size.prod(axis=1) if op == "attn_decode" else use.size[:, 0], 1)
            octave = np.minimum(np.log2(size).astype(np.int64), OCTAVES - 1)
            normal = standard_normals(f"{key} {op}", SAMPLES)
            present = np.unique(octave[use.time_s > 0])
            table = np.zeros((OCTAVES, SAMPLES))
            for here in present:
                rows = (octave == here) & (use.time_s > 0)
                sigma = self._mean_sigma(errors[op], use, rows)
                error = errors[op].common * normal[0] + sigma * normal[1 + here]
                table[here] = np.expm1(error)
            self._parts[_PARTS.get(op, LAYER)].append((use.time_s, octave, table))

    @staticmethod
    def _mean_sigma(error: OpError, use: OpUse, rows: np.ndarray) -> float:
        """Of the sizes of one octave, weighted by the time spent in each."""
        distinct, which = np.unique(use.size[rows], axis=0, return_inverse=True)
        weight = np.bincount(which.ravel(), use.time_s[rows])
        if len(distinct) > 512:  # thin out: a mean needs no more
            keep = np.argsort(weight)[-512:]
            distinct, weight = distinct[keep], weight[keep]
        return float(np.average(error.sigmas(distinct), weights=weight))

    def __call__(self, rows: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds added to layer, first stage, last stage and transfer; (rows, samples) each."""
        added = []
        for part in self._parts:
            total = np.zeros((len(rows), SAMPLES))
            for time_s, octave, table in part:
                total += time_s[rows, None] * table[octave[rows]]
            added.append(total)
        return added[0], added[1], added[2], added[3]


def makespan_samples(
    records: Records,
    rides: list[Rides],
    uses: list[dict[str, OpUse]],
    errors: dict[str, OpError],
    key: str,
) -> Floats:
    """The makespan in seconds under each of :data:`SAMPLES` joint draws of the op errors.

    ``uses`` are the replicas' :func:`~simulator.breakdown.breakdown`; ``key`` names the bundle.
    Runs on the same bundle get the same draws.
    """
    perturbed = [_Perturbed(use, errors, key) for use in uses]
    last = [np.arange(log.num_iterations)[-1:] for log in records.replicas]
    finish = retimed_finish(
        records, rides, lambda replica, rows: perturbed[replica](rows), SAMPLES, last
    )
    ends = np.concatenate([end for end in finish if len(end)])
    return np.asarray(ends.max(axis=0) - records.arrival_s.min())
