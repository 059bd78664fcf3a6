"""Metrics of paged memory: preemptions, recomputed tokens, hits in the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sarathi_sim.policies.log import DECODE, HIT, HIT_AGAIN, LOST
from sarathi_sim.simulator.loop.records import Ints, Records, ReplicaLog


def is_paged(records: Records) -> bool:
    """Whether the run's replicas have paged memory."""
    return any(log.pool is not None for log in records.replicas)


def paging_columns(records: Records) -> dict[str, Ints]:
    """Per request, by id.

    ``preemptions``; ``hit_tokens`` found in the prefix cache when it was first admitted, which were
    not computed; ``recomputed_tokens``: lost by preemption, and not found in the cache afterwards.
    """
    lost, hit, again = (np.zeros(len(records.request_id), np.int64) for _ in range(3))
    preemptions = np.zeros(len(records.request_id), np.int64)
    for log in records.replicas:
        if log.pool is None:
            continue
        request, kind, tokens = log.pool.events.T
        row = np.searchsorted(records.request_id, request)
        for sums, what in ((lost, LOST), (hit, HIT), (again, HIT_AGAIN)):
            np.add.at(sums, row[kind == what], tokens[kind == what])
        np.add.at(preemptions, row[kind == LOST], 1)
    # What a request finds again it had computed, or found, before.
    return {
        "preemptions": preemptions,
        "hit_tokens": hit,
        "recomputed_tokens": np.maximum(lost - again, 0),
    }


def extra_decodes(log: ReplicaLog) -> int:
    """Decodes of sequences that had ended, in iterations that were formed before that was known."""
    if log.pool is None:
        return 0
    _, role, _, first, last = log.spans.T
    decoded = role == DECODE
    return int(log.iterations["decodes"].sum()) - int((last - first + 1)[decoded].sum())


def paging_summary(records: Records, done: Mapping[str, Ints]) -> dict[str, Any]:
    """The run in numbers (docs/metrics.md); ``done`` are the requests that finished."""
    extra = sum(map(extra_decodes, records.replicas))
    computed = -extra + sum(
        float((log.iterations["prefill_tokens"] + log.iterations["decodes"]).sum())
        for log in records.replicas
    )
    prompts, finished = int(done["prompt_tokens"].sum()), len(done["request"])
    empty = sum(
        int(((log.iterations["chunks"] == 0) & (log.iterations["decodes"] == 0)).sum())
        for log in records.replicas
    )
    return {
        "preemptions": int(done["preemptions"].sum()),
        "preemption_rate": float(done["preemptions"].sum()) / finished if finished else 0.0,
        "hit_rate": float(done["hit_tokens"].sum()) / prompts if prompts else 0.0,
        "recomputed_share": float(done["recomputed_tokens"].sum()) / computed if computed else 0.0,
        "extra_decodes": extra,
        "empty_iterations": empty,
    }
