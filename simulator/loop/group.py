"""A replica with data-parallel attention: ranks in lock-step, one event a step.

Each rank has a queue, a scheduler, a KV cache and a batch of its own. A step begins on all ranks at
one instant and ends with the slowest one, because the experts of a layer see the tokens of all
ranks. A rank without a batch runs along with none (engines: a dummy batch), and has no iteration in
its log. Sources: vLLM ``v1/engine/core.py`` (``DPEngineCoreProc``), SGLang
``managers/scheduler_dp_attn_mixin.py``, TensorRT-LLM ``py_executor.py`` (attention DP).
"""

from __future__ import annotations

from collections import abc
from typing import Any, Protocol

import numpy as np
import simpy

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.scheduler import Scheduler
from .clock import ROUNDER
from .pipeline import Jitter, slowest_stage_s
from .records import (
    ITERATION_COLUMNS,
    RANK_COLUMNS,
    Columns,
    ReplicaLog,
    Switches,
    row_of,
)
from .replica import FIRST_ROWS, Nominal, Replica
from .routers import Balancer

Step = abc.Sequence[Batch | None]
"""The batch of each rank; None where it has none."""

#: What a rank's iteration has of its own, beside what its whole step has.
_OWN = (
    *("step", "rank", "own_s", "group", "ready_s", "layer_s", "first_s", "last_s", "send_s"),
    *("chunks", "prefill_tokens", "prefill_context", "decodes", "decode_context", "padding"),
    "drafts",
)
_ROW = row_of(_OWN)
_ROW_BYTES, _write_row = _ROW.size, _ROW.pack_into
_TABLE = np.dtype(list(zip(_OWN, _ROW.format, strict=True)))
MOST_ROWS = 16384
"""Iterations of all ranks in the largest block."""


class StepPredictor(Protocol):
    """Times a step. All results are whole quanta (see ``clock.py``), in seconds."""

    def __call__(self, step: Step) -> tuple[abc.Sequence[Nominal], Nominal]:
        """The times of each rank, if no other took longer (of one without a batch: any); and those
        of the whole step."""
        ...


class Ranks:
    """The schedulers of the ranks as one, whose batches are steps.

    While a rank's iterations repeat (:meth:`Scheduler.repeats`), its scheduler is not asked: the
    batch is formed again here, and the repetitions are booked together.

    ``since``  when a rank with no batch in flight got its first request, of those that have to wait
               for the other ranks' step
    """

    def __init__(self, schedulers: abc.Sequence[Scheduler], balancer: Balancer) -> None:
        self.schedulers, self.balancer = schedulers, balancer
        self.since: dict[int, float] = {}
        self.idle = True
        # Remote KV: all ranks note their reservations in one list.
        self.reserved: list[Sequence] = []
        self.rank_of: dict[int, int] = {}  # of each request that sends or receives KV
        for scheduler in schedulers:
            if isinstance(scheduler, Pool):
                scheduler.reserved = self.reserved
        self._agree: abc.Callable[[Any], None] | None = schedulers[0].policy.agree
        self._in_flight, self._most = 0, schedulers[0].max_in_flight
        count = len(schedulers)
        # Of each rank: the batch that repeats, the one that returned and is to be formed again, and
        # the number of repetitions to come, and of those not yet booked.
        self._repeating: list[Batch | None] = [None] * count
        self._returned: list[Batch | None] = [None] * count
        self._to_come, self._unbooked = [0] * count, [0] * count

    def add(self, request: Request) -> tuple[int, str | None]:
        """Queue a request at a rank; returns the rank, and why it is rejected or None."""
        rank = self.balancer.send(request)
        reason = self._asked(rank).add(request)
        if reason is not None:
            self.balancer.ended(rank, request)
        elif request.sends_kv or request.remote_tokens:
            self.rank_of[request.id] = rank
        return rank, reason

    def refusal(self, request: Request) -> str | None:
        """The reason why no rank can ever serve a request, or None."""
        return self.schedulers[0].refusal(request)

    def pool_of(self, request_id: int) -> tuple[int, Any]:
        """The rank, and its pool, that sends or receives the KV of a request."""
        rank = self.rank_of.pop(request_id)
        return rank, self._asked(rank)

    def set_costs(self, iteration_s: abc.Callable[[Batch], float]) -> None:
        """Set the function for the seconds of an iteration of one rank."""
        for scheduler in self.schedulers:
            scheduler.set_costs(iteration_s)

    def _asked(self, rank: int) -> Scheduler:
        """The scheduler of a rank, with all that repeated booked, to be asked again."""
        scheduler, batch = self.schedulers[rank], self._returned[rank]
        if self._unbooked[rank]:
            self._book(rank)
        if batch is not None:
            self._returned[rank] = None
            scheduler.complete(batch)
        self._to_come[rank] = 0
        return scheduler

    def _book(self, rank: int) -> None:
        batch = self._repeating[rank]
        assert batch is not None
        self.schedulers[rank].repeat(batch, self._unbooked[rank])
        self._unbooked[rank] = 0

    def next_batch(self) -> Step | None:
        """Form the next step; None if no rank has a batch."""
        if self._agree is not None:
            self._agree(self.schedulers)
        step: list[Batch | None] = []
        for rank, batch in enumerate(self._returned):
            if batch is None:
                step.append(self.schedulers[rank].next_batch())
                continue
            batch.iteration += self._most
            batch.decode_context += self._most * batch.num_decodes
            batch.longest_context += self._most
            self._unbooked[rank] += 1
            self._returned[rank] = None
            step.append(batch)
        if not any(step):
            self.since.clear()
            return None
        self._in_flight += 1
        self.idle = self._in_flight < self._most
        return step

    def complete(self, step: Step) -> list[Sequence]:
        """Book a step; returns the finished sequences, rank by rank."""
        self._in_flight -= 1
        self.idle = True
        finished: list[Sequence] = []
        to_come, returned = self._to_come, self._returned
        for rank, batch in enumerate(step):
            if batch is None:
                continue
            if returned[rank] is not None:  # with lazy formation, and more than two in flight
                self._asked(rank)
            if to_come[rank]:
                to_come[rank] -= 1
                returned[rank] = batch
                continue
            if self._unbooked[rank]:
                self._book(rank)
            if again := self.schedulers[rank].repeats(batch):
                to_come[rank] = again - 1
                returned[rank] = self._repeating[rank] = batch
            elif ended := self.schedulers[rank].complete(batch):
                finished += ended
                for sequence in ended:
                    self.balancer.ended(rank, sequence)
                    if not sequence.sends:  # (it is there yet if nothing was received)
                        self.rank_of.pop(sequence.id, None)
        return finished


class Group(Replica):
    """The ranks of a replica with data-parallel attention.

    ``layers`` are those of the only stage; ``balancer`` chooses the rank of an admitted request.
    With ``jitter``, one for each rank, a rank's layers and the rest of its step vary by one factor,
    and the others wait for it in every layer.
    """

    def __init__(
        self,
        env: simpy.Environment,
        schedulers: abc.Sequence[Scheduler],
        predict: StepPredictor,
        layers: tuple[int, ...],
        switches: Switches,
        balancer: Balancer,
        *,
        jitter: abc.Sequence[Jitter] = (),
        on_finished: abc.Callable[[list[Sequence], float], None] | None = None,
        on_reserved: abc.Callable[[list[Sequence], float], None] | None = None,
    ) -> None:
        if len(layers) != 1:
            raise ValueError("data-parallel attention needs a single stage")
        self.ranks, self._times_of = Ranks(schedulers, balancer), predict.__call__
        steps: Any = self.ranks  # a scheduler whose batches are steps
        times: Any = predict
        told: Any = {"on_finished": on_finished, "on_reserved": on_reserved}
        super().__init__(env, steps, times, layers, switches, **told)
        self._jitter = jitter
        self._no_jitter = [0.0] * len(schedulers)
        self._block = bytearray(FIRST_ROWS * len(schedulers) * _ROW.size)
        self._ends: list[tuple[float, float]] = []  # of each step in the block: finish, duration
        self._logged = [Columns((*ITERATION_COLUMNS, *RANK_COLUMNS)) for _ in schedulers]
        self._varied: list[list[float]] = [[] for _ in schedulers]

    def _iteration_s(self, batch: Batch) -> float:
        """Seconds of a step in which one rank alone has a batch."""
        return slowest_stage_s(self.pipeline.layers, self._times_of([batch])[1])

    def submit(self, request: Request) -> str | None:
        """Queue an admitted request at a rank. Returns why it is rejected, or None."""
        rank, reason = self.ranks.add(request)
        if reason is None:
            self._work_for(rank)
        return reason

    def rank_of(self, request_id: int) -> int:
        """The rank that sends the KV of a request, or receives it."""
        return self.ranks.rank_of[request_id]

    def sent(self, request_id: int) -> None:
        """The KV that a finished request left at its rank has been sent."""
        rank, pool = self.ranks.pool_of(request_id)
        pool.sent(request_id)
        if pool.num_unfinished:
            self._work_for(rank)

    def received(self, request_id: int) -> None:
        """The KV of a request whose prompt was computed elsewhere is at its rank."""
        rank, pool = self.ranks.pool_of(request_id)
        pool.received([request_id])
        self._work_for(rank)

    def _work_for(self, rank: int) -> None:
        """Form a step at this instant, or note since when the rank waits for that of others."""
        ranks, now = self.ranks, self.env.now
        if ranks.idle:
            self._wake(now)
        elif all(step[rank] is None for _, step in self._in_flight):
            ranks.since.setdefault(rank, now)

    def _launch(self, step: Any, now: float) -> None:
        nominals, whole = self._times_of(step)
        layers, since = self.pipeline.layers[0], self.ranks.since
        owns: abc.Sequence[float] = self._no_jitter
        if self._jitter:
            varied, whole = self._varied_times(step, nominals)
            owns = [layers * layer_s + first_s + last_s for layer_s, first_s, last_s, _ in varied]
        takes_s = layers * whole[0] + whole[1] + whole[2]
        finish = self.pipeline.launch_stages(now, (takes_s,), ())
        self._in_flight.append((finish + self._turnaround_s, step))
        if self._filled + len(step) * _ROW_BYTES > len(self._block):
            self._flush()
        block, filled, number, ready = self._block, self._filled, len(self._ends), now
        self._ends.append((finish, takes_s))
        for rank, batch in enumerate(step):
            if batch is None:
                continue
            layer_s, first_s, last_s, send_s = nominals[rank]
            chunks, context = batch.chunks, 0
            if chunks:
                for _, _, cached in chunks:
                    context += cached
            if since:
                ready = since.get(rank, now)
            _write_row(
                block, filled, number, rank, owns[rank], batch.slot, ready, layer_s, first_s,
                last_s, send_s, len(chunks), batch.prefill_tokens, context, batch.num_decodes,
                batch.decode_context, batch.padding, batch.drafts,
            )  # fmt: skip
            filled += _ROW_BYTES
        self._filled = filled
        since.clear()

    def _varied_times(
        self, step: Step, nominals: abc.Sequence[Nominal]
    ) -> tuple[list[Nominal], Nominal]:
        """The times of each rank, and of the step, with jitter."""
        varied = []
        for batch, nominal, jitter in zip(step, nominals, self._jitter, strict=True):
            factor = 0.0 if batch is None else jitter.factors()[0]
            layer_s, first_s, last_s, _ = ((factor * s + ROUNDER) - ROUNDER for s in nominal)
            varied.append((layer_s, first_s, last_s, 0.0))
        layer_s, first_s, last_s, _ = map(max, zip(*varied, strict=True))
        return varied, (layer_s, first_s, last_s, 0.0)

    def _flush(self) -> None:
        rows = np.frombuffer(memoryview(self._block)[: self._filled], _TABLE)
        step, (finish_s, takes_s) = rows["step"], np.reshape(self._ends, (-1, 2)).T
        tokens, own_s = rows["prefill_tokens"] + rows["decodes"] + rows["drafts"], rows["own_s"]
        if not self._jitter:
            own_s = self.pipeline.layers[0] * rows["layer_s"] + rows["first_s"] + rows["last_s"]
        most = np.zeros(len(self._ends), np.int64)
        np.maximum.at(most, step, tokens)
        columns = {name: rows[name] for name in _OWN if name in ITERATION_COLUMNS} | {
            "finish_s": finish_s[step],
            "waited_s": takes_s[step] - own_s,
            "all_tokens": np.bincount(step, tokens, len(most))[step],
            "most_tokens": most[step],
        }
        order = np.argsort(rows["rank"], kind="stable")
        ends = np.searchsorted(rows["rank"][order], np.arange(1, len(self._logged)))
        for rank, part in enumerate(np.split(order, ends)):
            self._logged[rank].append({name: column[part] for name, column in columns.items()})
            if self._jitter:
                self._varied[rank].extend(own_s[part].tolist())
        least = len(self._logged) * _ROW_BYTES
        self._block = bytearray(max(min(2 * len(self._block), MOST_ROWS * _ROW_BYTES), least))
        self._filled = 0
        self._ends.clear()

    def logs(self) -> list[ReplicaLog]:
        """The records of the run, as columns, of each rank."""
        self._flush()
        parts = zip(self.ranks.schedulers, self._logged, self._varied, strict=True)
        return [
            self._log(
                scheduler,
                columns,
                np.reshape(varied, (-1, 1)) if self._jitter else None,
            )
            for scheduler, columns, varied in parts
        ]
