"""The main loop: one replica's scheduler and pipeline, at most one event per micro-batch.

Micro-batches visit every stage in the order in which they were launched, so a stage starts one at
``max(arrival from the previous stage, finish of the batch before)``. The return of a batch from
the last stage can therefore be computed when it is launched, and only that return is an event.
"""

from __future__ import annotations

import math
from collections import abc, deque
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import simpy

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from .clock import DISPATCH, RETURN, Moment, quantize
from .pipeline import Pipeline, slowest_stage_s
from .records import (
    DEFAULT,
    ROW,
    Columns,
    Floats,
    PoolLog,
    ReplicaLog,
    Switches,
)

FIRST_ROWS, MOST_ROWS = 16, 2048
"""Iterations in the first block that is copied to the columns, and in the largest block. Block
sizes double from the first to the largest."""
_ROW_BYTES, _write_row = ROW.size, ROW.pack_into

Nominal = tuple[float, float, float, float]
"""Seconds: one layer; extra on the first stage; extra on the last; transfer to the next."""


class Predictor(Protocol):
    """Times a batch. All results are whole quanta (see ``clock.py``), in seconds."""

    def __call__(self, batch: Batch) -> Nominal:
        """The times of the batch."""
        ...


class Service(Protocol):
    """Times a batch on each stage, in place of the predicted time of the stage's layers."""

    def __call__(
        self, batch: Batch, nominal: Nominal
    ) -> tuple[abc.Sequence[float], abc.Sequence[float], float]:
        """Seconds, all whole quanta: on each stage, on each link, and the turn-around."""
        ...


class Replica:
    """A scheduler in front of a pipeline of ``len(layers)`` stages.

    ``service``      replaces the stages' nominal times: jitter, or times recorded on a real engine
    ``opens``        the earliest instant at which the next batch may be formed; with lazy formation
                     that is when stage 0 is free
    ``on_finished``  called with the requests that a returned batch finished, and when
    ``on_reserved``  called with the sequences for whose remote KV a batch's formation reserved
                     blocks, and when
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        predict: Predictor,
        layers: tuple[int, ...],
        switches: Switches = DEFAULT,
        *,
        service: Service | None = None,
        opens: abc.Callable[[], float] | None = None,
        on_finished: abc.Callable[[list[Sequence], float], None] | None = None,
        on_reserved: abc.Callable[[list[Sequence], float], None] | None = None,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self._pool: Any = scheduler  # one that knows of remote KV, where this is asked of it
        self.predict = predict.__call__  # looked up once: a look-up for every batch is slower
        self.pipeline = Pipeline(layers, switches.blocking_send)
        self.switches = replace(switches, turnaround_s=float(quantize(switches.turnaround_s)))
        self.service = service
        self._turnaround_s = self.switches.turnaround_s
        self._pass = self.pipeline.launch
        scheduler.set_costs(self._iteration_s)
        self.opens = opens or (self._stage_0_free if switches.lazy else None)
        self.on_finished = on_finished
        self.on_reserved = on_reserved
        self._peeks = self.opens is not None or on_reserved is not None
        self._block, self._filled = bytearray(FIRST_ROWS * ROW.size), 0
        self._columns = Columns()
        self._stage_rows: list[abc.Sequence[float]] = []
        self._in_flight: deque[tuple[float, Any]] = deque()  # batches, with return times
        self._awaiting = False  # whether an event is set for the next return
        self._wake_at = -1.0  # the instant of the next dispatch event

    def _iteration_s(self, batch: Batch) -> float:
        """Seconds of a batch on the slowest stage."""
        return slowest_stage_s(self.pipeline.layers, self.predict(batch))

    def submit(self, request: Request) -> str | None:
        """Queue an arrived request. Returns why it is rejected, or None."""
        reason = self.scheduler.add(request)
        if reason is None:
            self._stir()
        return reason

    def rank_of(self, request_id: int) -> int:
        """The rank that sends the KV of a request: the only one."""
        return 0

    def sent(self, request_id: int) -> None:
        """The KV that a finished request left here has been sent: its blocks are free."""
        self._pool.sent(request_id)
        self._stir()

    def received(self, request_id: int) -> None:
        """The KV of a request whose prompt was computed elsewhere is here."""
        self._pool.received([request_id])
        self._stir()

    def _stir(self) -> None:
        """Form batches at this instant, unless the next return does so."""
        if self.scheduler.idle:
            self._wake(self.env.now)

    def _woken(self, _: Moment) -> None:
        """Form batches at this instant, after all its other events."""
        now = self.env.now
        if now == self._wake_at:
            self._wake_at = -1.0
        self._dispatch(now)
        self._await_return()

    def _stage_0_free(self) -> float:
        return self.pipeline.free[0]

    def _dispatch(self, now: float) -> None:
        """Form and launch batches until there is none to form."""
        scheduler, opens = self.scheduler, self.opens
        while scheduler.idle:
            if opens is not None and (at := opens()) > now:
                if at < math.inf:
                    self._wake(at)
                return
            batch = scheduler.next_batch()
            if self.on_reserved is not None and (reserved := self._pool.reserved):
                self.on_reserved(reserved, now)
                reserved.clear()
            if batch is None:
                return
            self._launch(batch, now)

    def _launch(self, batch: Batch, now: float) -> None:
        """Send a batch down the pipeline, and note when the last stage finishes it."""
        layer_s, first_s, last_s, send_s = self.predict(batch)
        turnaround_s = self._turnaround_s
        if self.service is None:
            finish = self._pass(now, layer_s, first_s, last_s, send_s)
        else:
            nominal = (layer_s, first_s, last_s, send_s)
            durations, sends, turnaround_s = self.service(batch, nominal)
            self._stage_rows.append(durations)
            finish = self.pipeline.launch_stages(now, durations, sends)
        chunks = batch.chunks
        context = 0
        for _, _, cached in chunks:
            context += cached
        filled = self._filled
        _write_row(
            self._block, filled, batch.slot, now, finish, layer_s, first_s, last_s, send_s,
            len(chunks), batch.prefill_tokens, context, batch.num_decodes, batch.decode_context,
            batch.padding, batch.drafts,
        )  # fmt: skip
        self._filled = filled = filled + _ROW_BYTES
        self._in_flight.append((finish + turnaround_s, batch))
        if filled == len(self._block):
            self._columns.extend(self._block)
            self._block = bytearray(min(2 * filled, MOST_ROWS * _ROW_BYTES))
            self._filled = 0

    def _returned(self, _: Moment) -> None:
        """Book the batch that came back from the last stage and form its successor. Batches come
        back in launch order. As long as nothing else in the simulation happens before the next
        return, this return is handled here, too, without an event."""
        self._awaiting = False
        env, scheduler, in_flight = self.env, self.scheduler, self._in_flight
        now, others = env.now, env.peek()
        while True:
            finished = scheduler.complete(in_flight.popleft()[1])
            if finished and self.on_finished is not None:
                self.on_finished(finished, now)
                others = env.peek()  # clients may have sent their next requests
            if others > now:
                self._dispatch(now)
                if self._peeks:
                    others = env.peek()  # _dispatch may have set an event
            else:
                self._wake(now)  # after all other events of this instant
            if not in_flight or in_flight[0][0] >= others:
                break
            now = in_flight[0][0]
        self._await_return()

    def _await_return(self) -> None:
        if self._in_flight and not self._awaiting:
            self._awaiting = True
            Moment(
                self.env,
                self._in_flight[0][0] - self.env.now,
                RETURN,
                self._returned,
            )

    def _wake(self, when: float) -> None:
        """Dispatch at ``when``, after everything else that happens at that instant."""
        if self._wake_at != when:
            self._wake_at = when
            Moment(self.env, when - self.env.now, DISPATCH, self._woken)

    def log(self) -> ReplicaLog:
        """The records of the run, as columns."""
        self._columns.extend(memoryview(self._block)[: self._filled])
        self._filled = 0
        stages = len(self.pipeline.layers)
        stage_s = np.array(self._stage_rows).reshape(-1, stages) if self.service else None
        return self._log(self.scheduler, self._columns, stage_s)

    def logs(self) -> list[ReplicaLog]:
        """:meth:`log`, or those of the ranks."""
        return [self.log()]

    def _log(self, scheduler: Scheduler, columns: Columns, stage_s: Floats | None) -> ReplicaLog:
        return ReplicaLog(
            layers=self.pipeline.layers,
            switches=self.switches,
            max_in_flight=scheduler.max_in_flight,
            max_batch=scheduler.max_batch,
            kv_capacity=scheduler.kv_capacity,
            iterations=columns,
            spans=np.frombuffer(scheduler.spans, np.int64).reshape(-1, 5),
            stage_s=stage_s,
            pool=_pool_log(scheduler) if isinstance(scheduler, Pool) else None,
        )


def _pool_log(pool: Pool) -> PoolLog:
    return PoolLog(
        np.frombuffer(pool.kv_log, np.int32),
        pool.blocks.block_size,
        np.frombuffer(pool.events, np.int64).reshape(-1, 3),
    )
