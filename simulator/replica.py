"""The main loop: one replica's scheduler and pipeline, at most one event per micro-batch.

Micro-batches visit every stage in the order in which they were launched, so a stage starts one at
``max(arrival from the previous stage, finish of the batch before)``. The return of a batch from
the last stage can therefore be computed when it is launched, and only that return is an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import simpy

from policies.batch import Batch
from policies.request import Request, Sequence
from policies.scheduler import Scheduler
from simulator.jitter import Jitter
from simulator.moment import DISPATCH, RETURN, Moment
from simulator.quantum import ROUNDER, quantize
from simulator.records import Columns, ReplicaLog

BLOCK_ROWS = 4096
"""Iterations recorded as tuples before they go to the columns, which take a fifth of the memory."""


class Predictor(Protocol):
    """Times a batch. All results are whole quanta (see ``quantum.py``), in seconds."""

    def __call__(self, batch: Batch) -> tuple[float, float, float, float]:
        """Time of one layer; extra on the first stage; extra on the last; transfer to the next."""
        ...


class Replica:
    """A scheduler in front of a pipeline of ``len(layers)`` stages.

    ``lazy``           form a batch when stage 0 is free, not as soon as a micro-batch returned
    ``blocking_send``  a stage is occupied while it sends its result on
    ``turnaround_s``   from a batch's finish until the scheduler can put its successor on stage 0
    ``on_finished``    called with the requests that a returned batch finished, and when
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        predict: Predictor,
        layers: tuple[int, ...],
        *,
        lazy: bool = False,
        blocking_send: bool = False,
        turnaround_s: float = 0.0,
        jitter: Jitter | None = None,
        on_finished: Callable[[list[Sequence], float], None] | None = None,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.predict = predict
        self.layers = layers
        self.lazy = lazy
        self.blocking_send = blocking_send
        self.turnaround_s = quantize(turnaround_s)
        self.jitter = jitter
        self.on_finished = on_finished
        # Stages alike, no jitter, sends overlapped: the common case, and cheaper per batch.
        self._plain = len(set(layers)) == 1 and jitter is None and not blocking_send
        self._later_stages = range(1, len(layers))
        self._free = [0.0] * len(layers)  # when each stage has finished what it was given
        self._rows: list[tuple[float, ...]] = []
        self._columns = Columns()
        self._stage_rows: list[list[float]] = []
        self._in_flight: deque[tuple[float, Batch]] = deque()  # when each comes back, in order
        self._awaiting = False  # whether a moment is set for the first of them
        self._wake_at = -1.0  # when a dispatch is set for

    def submit(self, request: Request) -> str | None:
        """Hand over an arrived request. Returns why it is rejected, or None."""
        reason = self.scheduler.add(request)
        if reason is None:
            self._wake(self.env.now)
        return reason

    def _woken(self, _: Moment) -> None:
        """Form batches at this instant, of which everything else has happened."""
        now = self.env.now
        if now == self._wake_at:
            self._wake_at = -1.0
        self._dispatch(now)
        self._await_return()

    def _dispatch(self, now: float) -> None:
        """Form and launch batches for as long as there is one to form."""
        scheduler = self.scheduler
        while scheduler.idle:
            if self.lazy and self._free[0] > now:
                self._wake(self._free[0])
                return
            batch = scheduler.next_batch()
            if batch is None:
                return
            self._launch(batch, now)

    def _launch(self, batch: Batch, now: float) -> None:
        """Send a batch down the pipeline, and come back when the last stage finishes it."""
        layer_s, first_s, last_s, send_s = self.predict(batch)
        if self._plain:
            free = self._free
            duration = self.layers[0] * layer_s
            busy_until = free[0]
            finish = (now if now > busy_until else busy_until) + duration + first_s
            free[0] = finish
            for stage in self._later_stages:
                finish += send_s
                busy_until = free[stage]
                if busy_until > finish:
                    finish = busy_until
                finish += duration
                free[stage] = finish
            free[-1] = finish = finish + last_s
        else:
            durations = [n * layer_s for n in self.layers]
            durations[0] += first_s
            durations[-1] += last_s
            finish = self._pass_through(now, durations, send_s)
        chunks = batch.chunks
        context = 0
        for _, _, cached in chunks:
            context += cached
        self._rows.append(
            (
                batch.group.index,
                now,
                finish,
                layer_s,
                first_s,
                last_s,
                send_s,
                len(chunks),
                batch.prefill_tokens,
                context,
                batch.num_decodes,
                batch.decode_context,
                batch.padding,
            )
        )
        self._in_flight.append((finish + self.turnaround_s, batch))
        if len(self._rows) == BLOCK_ROWS:
            self._columns.extend(self._rows)
            self._rows.clear()

    def _pass_through(self, now: float, durations: list[float], send_s: float) -> float:
        """Occupy every stage in turn, whatever the switches; returns the last one's finish."""
        if self.jitter is not None:
            factors = self.jitter.factors()
            durations = [
                (d * f + ROUNDER) - ROUNDER for d, f in zip(durations, factors, strict=True)
            ]
            self._stage_rows.append(durations)
        free = self._free
        held = send_s if self.blocking_send else 0.0
        arrival = finish = now
        for stage, duration in enumerate(durations):
            finish = max(arrival, free[stage]) + duration
            free[stage] = finish + held
            arrival = finish + send_s
        free[-1] = finish  # nothing to send from the last stage
        return finish

    def _returned(self, _: Moment) -> None:
        """Book the batch that came back from the last stage and form its successor.

        Batches come back in launch order. As long as nothing else in the simulation happens before
        the next return, that one is handled right here, and costs no event.
        """
        self._awaiting = False
        env, scheduler, in_flight = self.env, self.scheduler, self._in_flight
        now = env.now
        while True:
            finished = scheduler.complete(in_flight.popleft()[1])
            if finished and self.on_finished is not None:
                self.on_finished(finished, now)
            others = env.peek()
            if others > now:
                self._dispatch(now)
                if self.lazy:
                    others = env.peek()  # may have woken itself for when stage 0 is free
            else:
                self._wake(now)  # not before everything that happens at this instant
            if not in_flight or in_flight[0][0] >= others:
                break
            now = in_flight[0][0]
        self._await_return()

    def _await_return(self) -> None:
        """Be there when the next batch comes back."""
        if self._in_flight and not self._awaiting:
            self._awaiting = True
            Moment(self.env, self._in_flight[0][0] - self.env.now, RETURN, self._returned)

    def _wake(self, when: float) -> None:
        """Dispatch at ``when``, after everything else that happens at that instant."""
        if self._wake_at != when:
            self._wake_at = when
            Moment(self.env, when - self.env.now, DISPATCH, self._woken)

    def log(self) -> ReplicaLog:
        """What happened, as columns."""
        self._columns.extend(self._rows)
        self._rows.clear()
        scheduler = self.scheduler
        return ReplicaLog(
            layers=self.layers,
            blocking_send=self.blocking_send,
            turnaround_s=self.turnaround_s,
            max_in_flight=len(scheduler.groups),
            lazy=self.lazy,
            max_batch=scheduler.max_batch,
            kv_capacity=scheduler.kv_capacity,
            iterations=self._columns,
            rides=np.frombuffer(scheduler.rides, np.int64).reshape(-1, 5),
            stage_s=(
                np.array(self._stage_rows).reshape(-1, len(self.layers))
                if self.jitter is not None
                else None
            ),
        )
