"""The records of a simulation: flat columns, which pure functions analyse afterwards; and the
switches of the simulated engine, which they keep."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EngineSwitches:
    """The switches that are keys of a configuration's section ``engine``, with names and bounds.

    ``turnaround_s``   from a batch's finish until the scheduler can put its successor on stage 0
    ``jitter``         coefficient of variation of every stage time (0: none)
    """

    turnaround_s: Annotated[
        float,
        Field(ge=0, le=3600, title="scheduler turn-around"),
        Field(json_schema_extra={"short": "turn-around"}),
    ] = 0.0
    jitter: Annotated[
        float,
        Field(ge=0, le=1, title="jitter (coefficient of variation)"),
        Field(json_schema_extra={"short": "jitter"}),
    ] = 0.0


@dataclass(frozen=True)
class Switches(EngineSwitches):
    """The switches of the simulated engine.

    ``lazy``           form a batch when stage 0 is free, not as soon as a micro-batch returned
    ``blocking_send``  a stage is occupied while it sends its result on
    """

    lazy: bool = False
    blocking_send: bool = False


DEFAULT = Switches()
"""The reference system: eager formation, overlapped sends, no turn-around, no jitter."""

ITERATION_COLUMNS = (
    "group",  # micro-batch slot
    "ready_s",  # when the batch was formed
    "finish_s",  # when the last stage finished it
    "layer_s",  # time of one layer
    "first_s",  # extra time on the first stage (embedding)
    "last_s",  # extra time on the last stage (LM head)
    "send_s",  # transfer to the next stage
    "chunks",  # prefill chunks
    "prefill_tokens",
    "prefill_context",  # KV tokens the chunks' sequences held before, summed
    "decodes",
    "decode_context",  # KV tokens the decodes held before, summed
    "padding",  # decodes that are finished sequences held as padding
    "drafts",  # draft tokens of the decodes
)

RANK_COLUMNS = (
    "waited_s",  # after its own work, for the ranks that took longest
    "all_tokens",  # token rows of all ranks in this step
    "most_tokens",  # token rows of the rank that had most
)
"""Further columns of a rank of a replica with data-parallel attention."""


def row_of(columns: Iterable[str]) -> Struct:
    """An iteration's values, seconds and counts, as the loop writes them into a block of bytes: a
    tuple of them would take twice the time, and four times the memory."""
    return Struct("".join("d" if name.endswith("_s") else "q" for name in columns))


ROW = row_of(ITERATION_COLUMNS)

COUNTED = ("group", "chunks", "prefill_tokens", "decodes", "padding", "drafts")
"""The columns stored in four bytes: counts of groups, of sequences, or of one batch's tokens."""


class Columns(Mapping[str, Floats]):
    """Iteration columns by name, as floats. They grow while a simulation runs. Arrays of the
    standard library do that in place, so that a run of millions of iterations never holds two
    copies of them."""

    def __init__(self, names: Iterable[str] = ITERATION_COLUMNS) -> None:
        self._held = {name: array("i" if name in COUNTED else "d") for name in names}

    def extend(self, rows: bytearray | memoryview) -> None:
        """Add iterations: the values of each one's columns, in their order, as :data:`ROW`."""
        table = np.frombuffer(rows, list(zip(ITERATION_COLUMNS, ROW.format, strict=True)))
        self.append({name: table[name] for name in self._held})

    def append(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add iterations by column."""
        for name, held in self._held.items():
            held.frombytes(columns[name].astype(held.typecode).tobytes())

    def __getitem__(self, name: str) -> Floats:
        held = self._held[name]
        return np.frombuffer(held, held.typecode).astype(np.float64, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclass(frozen=True)
class StageTimes:
    """Times in seconds, shape (iterations, stages), in launch order. A stage is occupied from
    ``start`` to ``release``: until ``finish``, and with blocking sends until its result is on the
    next stage."""

    start: Floats
    finish: Floats
    release: Floats


@dataclass(frozen=True)
class PoolLog:
    """The memory of a replica with paged KV. ``kv_blocks`` are the blocks of ``block_size`` tokens
    in use after each micro-batch was formed. ``events`` has the columns request, kind (HIT,
    HIT_AGAIN, LOST, REMOTE, DRAFTED or ACCEPTED; ``policies/log.py``) and tokens."""

    kv_blocks: npt.NDArray[np.int32]
    block_size: int
    events: Ints

    @property
    def kv_tokens(self) -> Ints:
        """The capacity of the blocks in use, in tokens."""
        return self.kv_blocks.astype(np.int64) * self.block_size


@dataclass(frozen=True)
class ReplicaLog:
    """Everything that happened on one replica.

    ``iterations`` maps each of :data:`ITERATION_COLUMNS` to an array with one entry per
    micro-batch, in launch order (which is the order on every stage). The log of one rank of a
    replica with data-parallel attention has :data:`RANK_COLUMNS`, too; its micro-batches are those
    of this rank, and its times those of the rank alone, had all others finished no later.

    ``spans`` has the columns request, role (PREFILL, DECODE or PADDING), group, first and last:
    the request took part in these consecutive iterations of the group, counted from 0.

    ``stage_s`` holds the time on each stage, shape (iterations, stages), if jitter made it differ
    from the iteration columns.

    ``pool`` is given for paged memory.

    ``measured`` are the stage times of a real engine, if this is its log: they do not follow from
    the durations.

    ``first_token_s`` is when the first token of each request came that did not compute it here, by
    id; of those that are not there it comes with the second one.
    """

    layers: tuple[int, ...]
    switches: Switches
    max_in_flight: int
    max_batch: int
    kv_capacity: int
    iterations: Mapping[str, Floats]
    spans: Ints
    stage_s: Floats | None = None
    measured: StageTimes | None = None
    pool: PoolLog | None = None
    first_token_s: Mapping[int, float] | None = None

    @property
    def num_iterations(self) -> int:
        """Micro-batches that ran."""
        return len(self.iterations["ready_s"])

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    @property
    def waited_s(self) -> Floats | None:
        """How long each micro-batch of a rank waited for other ranks; None for a whole replica."""
        return self.iterations.get("waited_s")

    def stage_durations(self) -> Floats:
        """Time of every micro-batch on every stage in seconds, shape (iterations, stages). Waits
        for other ranks do not count."""
        if self.stage_s is not None:
            return self.stage_s
        columns = self.iterations
        # Each stage is contiguous in memory, as in every array computed from them.
        durations: Floats = np.multiply.outer(np.array(self.layers, float), columns["layer_s"]).T
        durations[:, 0] += columns["first_s"]
        durations[:, -1] += columns["last_s"]
        return durations


@dataclass(frozen=True)
class Handovers:
    """What two pools did with each request; the columns are aligned with those of the records.

    The first ``prefill_logs`` logs are the prefill pool's, the others the decode pool's.
    ``prefilled_on`` is the replica of the prefill, -1 for a rejected request, or one whose prompt
    was in a decode worker's cache before. The prefill ended at ``prefill_end_s``, blocks of the
    decode worker were reserved at ``reserved_s``, and the KV was there at ``received_s`` (NaN where
    nothing was sent).
    """

    prefill_logs: int
    prefilled_on: Ints
    prefill_end_s: Floats
    reserved_s: Floats
    received_s: Floats


@dataclass(frozen=True)
class Records:
    """A finished simulation.

    The request columns are aligned: ``replica`` is where a request went, or -1 if it was rejected
    (then ``rejections`` says why). ``arrival_s`` is when it reached the front end,
    whose queue counts as queueing; ``frontend_s`` is the time that each request spent on the way,
    before and after the engine. ``replicas`` has ``ranks`` logs for each replica of each pool, one
    of each rank with data-parallel attention; ``replica`` counts these logs.
    """

    request_id: Ints
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    replica: Ints
    rejections: dict[int, str]
    replicas: list[ReplicaLog]
    frontend_s: float = 0.0
    ranks: tuple[int, ...] = (1,)
    handovers: Handovers | None = None

    @property
    def prefill_logs(self) -> int:
        """The first so many logs are those of a pool of their own; 0 with one pool."""
        return self.handovers.prefill_logs if self.handovers is not None else 0

    def called(self, log: int) -> str:
        """The name of a log: the number of its replica; with two pools after its pool, and with
        several ranks before the rank, as in ``decode 0 rank 3``."""
        pool, ranks = "", self.ranks[0]
        if self.handovers is not None:
            pool = "prefill "
            if log >= self.prefill_logs:
                log, pool, ranks = log - self.prefill_logs, "decode ", self.ranks[-1]
        replica, rank = divmod(log, ranks)
        return f"{pool}{replica}" + (f" rank {rank}" if ranks > 1 else "")

    @property
    def end_s(self) -> float:
        """When the last micro-batch finished (0 if nothing ran)."""
        return max(
            (float(r.iterations["finish_s"][-1]) for r in self.replicas if r.num_iterations),
            default=0.0,
        )
