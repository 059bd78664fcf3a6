"""The memory that a run needs on this machine, refused if it is too much."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sarathi_sim.profiler.storage.child import available_bytes, size_text
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.op_times.predictor import TableSizes
from .base import Source
from .scenario import Scenario
from .workload import ZipfLengths

REQUEST_BYTES, RECORD_BYTES = 300, 1100
"""Memory of a request; of its records and metrics (docs/lab/performance.md)."""

TURN_BYTES = 230
"""Additional memory of a request that is a turn of a session."""

LENGTH_CLASS_BYTES = 40
"""A class of Zipf lengths: its tokens, weight, probability and their running sum."""

GROUP_BYTES, STAGE_BYTES, REPLICA_BYTES = 700, 1000, 6000
"""A micro-batch's records; a stage's idle times and row of the ledger; the rest of a replica."""

TOKEN_BYTES, POINT_BYTES, CHUNK_POINT_BYTES = 350, 330, 60
"""A row count in the predictor's table; a point of its attention tables that are computed at once;
a point of the chunks' tables, which are computed block by block."""

ALWAYS_FREE = 16_000_000
"""Needs below this are not checked: a sweep's small runs need no more, and asking the system for
free memory would take a tenth of their time."""


@dataclass(frozen=True)
class Need:
    """``num_bytes`` for ``what``, caused by the value of ``key``."""

    what: str
    num_bytes: int
    key: str


def workload_needs(scenario: Scenario) -> list[Need]:
    """The memory for the requests. A trace's reader checks its own
    (``simulator/load/trace.py``)."""
    workload, lengths = scenario.workload, scenario.workload.lengths
    each = REQUEST_BYTES + RECORD_BYTES + (TURN_BYTES if workload.sessions else 0)
    size = each * (workload.requests or 0)
    needs = [Need("requests and their records", size, "workload.requests")]
    if isinstance(lengths, ZipfLengths):
        classes = max(0, lengths.max - lengths.min) // lengths.step + 1
        size = LENGTH_CLASS_BYTES * classes
        needs.append(Need("classes of lengths", size, "workload.lengths.max"))
    return needs


def run_needs(scenario: Scenario, num_requests: int, tables: TableSizes) -> list[Need]:
    """The memory to simulate a resolved scenario, without its requests."""
    cluster, batching = scenario.cluster, scenario.batching
    replica = REPLICA_BYTES + STAGE_BYTES * cluster.pp + GROUP_BYTES * (batching.max_in_flight or 1)
    by_chunk = tables.chunk_points * CHUNK_POINT_BYTES
    return [
        Need("records of requests", RECORD_BYTES * num_requests, "workload.requests"),
        Need("replicas", replica * cluster.replicas * cluster.dp, "cluster.replicas"),
        Need("times by tokens", TOKEN_BYTES * tables.token_rows * cluster.dp, "workload.lengths"),
        Need(
            "attention of whole prompts", POINT_BYTES * tables.whole_prompts, "cluster.max_length"
        ),
        Need("attention of decodes", POINT_BYTES * tables.decode_points, "batching.max_batch"),
        Need("attention of chunks", by_chunk, "policy.chunk_size"),
    ]


def check_memory(needs: Collection[Need], scenario: Scenario, source: Source) -> None:
    """Raises UserError, naming the key that needs most, if this machine has too little."""
    problem = shortage(needs)
    if problem is not None:
        largest = max(needs, key=lambda need: need.num_bytes)
        raise source.error(largest.key, _value(scenario, largest.key), problem)


def shortage(needs: Iterable[Need]) -> str | None:
    """The needed and the free memory as text; None if there is enough."""
    largest_first = sorted(needs, key=lambda need: -need.num_bytes)
    total = sum(need.num_bytes for need in largest_first)
    if total <= ALWAYS_FREE or total <= (free := available_bytes()):
        return None
    parts = ", ".join(
        f"{n.what} {size_text(n.num_bytes)}" for n in largest_first[:3] if n.num_bytes
    )
    needed = f"would take about {size_text(total)} of memory ({parts})"
    return f"{needed}, but only {size_text(free)} are free"


def _value(scenario: Scenario, key: str) -> object:
    value: object = scenario
    for part in key.split("."):
        value = getattr(value, part, None)
    return value.model_dump() if hasattr(value, "model_dump") else value


def check_together(needs: Iterable[tuple[str, Iterable[Need]]], file: str) -> None:
    """Raises UserError if the scenarios together need more memory than is free.

    ``needs`` are each scenario's name and needs.
    """
    whole = [Need(f"scenario {name}", sum(n.num_bytes for n in each), "") for name, each in needs]
    problem = shortage(whole)
    if problem is not None:
        raise UserError(f"{file}: scenarios: together they {problem}; run fewer at a time")
