"""The records of a simulation: flat columns, which pure functions analyse afterwards."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct

import numpy as np
import numpy.typing as npt

from sarathi_sim.simulator.loop.switches import Switches

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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


ROW = Struct("".join("d" if name.endswith("_s") else "q" for name in ITERATION_COLUMNS))
"""An iteration's values, seconds and counts, as the loop writes them into a block of bytes: a tuple
of them would take twice the time, and four times the memory."""

COUNTED = ("group", "chunks", "prefill_tokens", "decodes", "padding", "drafts")
"""The columns stored in four bytes: counts of groups, of sequences, or of one batch's tokens."""


class Columns(Mapping[str, Floats]):
    """Iteration columns by name, as floats.

    They grow while a simulation runs. Arrays of the standard library do that in place, so that a
    run of millions of iterations never holds two copies of them.
    """

    def __init__(self) -> None:
        self._held = {name: array("i" if name in COUNTED else "d") for name in ITERATION_COLUMNS}

    def extend(self, rows: bytearray | memoryview) -> None:
        """Add iterations: the values of each one's columns, in their order, as :data:`ROW`."""
        table = np.frombuffer(rows, list(zip(ITERATION_COLUMNS, ROW.format, strict=True)))
        for name, held in self._held.items():
            held.frombytes(table[name].astype(held.typecode).tobytes())

    def __getitem__(self, name: str) -> Floats:
        held = self._held[name]
        return np.frombuffer(held, held.typecode).astype(np.float64, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclass(frozen=True)
class StageTimes:
    """Times in seconds, shape (iterations, stages), in launch order.

    A stage is occupied from ``start`` to ``release``: until ``finish``, and with blocking sends
    until its result is on the next stage.
    """

    start: Floats
    finish: Floats
    release: Floats


@dataclass(frozen=True)
class PoolLog:
    """The memory of a replica with paged KV.

    ``kv_blocks`` are the blocks of ``block_size`` tokens in use after each micro-batch was formed.
    ``events`` has the columns request, kind (HIT, HIT_AGAIN, LOST, DRAFTED or ACCEPTED;
    ``policies/log.py``) and tokens.
    """

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
    micro-batch, in launch order (which is the order on every stage).

    ``spans`` has the columns request, role (PREFILL, DECODE or PADDING), group, first and last:
    the request took part in these consecutive iterations of the group, counted from 0.

    ``stage_s`` holds the time on each stage, shape (iterations, stages), if jitter made it differ
    from the iteration columns.

    ``pool`` is given for paged memory.

    ``measured`` are the stage times of a real engine, if this is its log: they do not follow from
    the durations.
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

    @property
    def num_iterations(self) -> int:
        """Micro-batches that ran."""
        return len(self.iterations["ready_s"])

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    def stage_durations(self) -> Floats:
        """Time of every micro-batch on every stage in seconds, shape (iterations, stages)."""
        if self.stage_s is not None:
            return self.stage_s
        columns = self.iterations
        # Each stage is contiguous in memory, as in every array computed from them.
        durations: Floats = np.multiply.outer(np.array(self.layers, float), columns["layer_s"]).T
        durations[:, 0] += columns["first_s"]
        durations[:, -1] += columns["last_s"]
        return durations


@dataclass(frozen=True)
class Records:
    """A finished simulation.

    The request columns are aligned: ``replica`` is where a request went, or -1 if it was rejected
    (then ``rejections`` says why). ``arrival_s`` is when it reached the front end,
    whose queue counts as queueing; ``frontend_s`` is the time that each request spent on the way,
    before and after the engine.
    """

    request_id: Ints
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    replica: Ints
    rejections: dict[int, str]
    replicas: list[ReplicaLog]
    frontend_s: float = 0.0

    @property
    def end_s(self) -> float:
        """When the last micro-batch finished (0 if nothing ran)."""
        return max(
            (float(r.iterations["finish_s"][-1]) for r in self.replicas if r.num_iterations),
            default=0.0,
        )
