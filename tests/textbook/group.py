"""The textbook's ranks with data-parallel attention: a process for each, which meets the others
after the embedding, after every layer and after the LM head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import simpy

from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.loop.clock import DISPATCH, Moment, quantize
from sarathi_sim.simulator.loop.group import StepPredictor
from sarathi_sim.simulator.loop.records import Switches
from tests.textbook.pipeline import Member, Micro, Process, TextbookPipeline, _admission


class Barrier:
    """Where so many processes wait for each other."""

    def __init__(self, env: simpy.Environment, count: int) -> None:
        self.env, self.count = env, count
        self.there, self.all_there = 0, env.event()

    def meet(self) -> Process:
        self.there += 1
        if self.there < self.count:
            yield self.all_there
        else:
            opened, self.all_there, self.there = self.all_there, self.env.event(), 0
            opened.succeed()


@dataclass(eq=False)
class RankStep:
    """A step: the batch of each rank, and how many ranks have finished it."""

    micros: list[Micro | None]
    done: int = 0


@dataclass(eq=False)
class TextbookGroup:
    """Ranks, which are replicas whose stages stay empty: they form batches, and book them."""

    env: simpy.Environment
    ranks: list[TextbookPipeline]
    predict: StepPredictor
    layers: int
    switches: Switches
    max_in_flight: int
    choose: Callable[[int], TextbookPipeline] | None = None
    answer: Callable[[Member], None] | None = None
    under_way: list[RankStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turnaround_s = float(quantize(self.switches.turnaround_s))
        self.barrier = Barrier(self.env, len(self.ranks))
        self.stores = [simpy.Store(self.env) for _ in self.ranks]
        self.since: dict[int, float] = {}
        self.sent = 0
        self.running = self._dispatching = False
        self._answered: set[int] = set()
        for number, rank in enumerate(self.ranks):
            rank._wake = partial(self._wake, number)
            rank.predict = lambda batch: self.predict([batch])[1]
            self.env.process(self._rank(number))

    @property
    def rejected(self) -> list[int]:
        return [id for rank in self.ranks for id in rank.rejected]

    def everybody(self) -> list[Member]:
        return [member for rank in self.ranks for member in rank.everybody()]

    def submit(self, request: Request) -> None:
        assert self.choose is not None
        rank = self.choose(self.sent)
        self.sent += 1
        rank.submit(request)

    def _wake(self, number: int = -1) -> None:
        """A request has arrived at a rank, or a step has returned."""
        if number >= 0 and len(self.under_way) == self.max_in_flight:
            if all(step.micros[number] is None for step in self.under_way):
                self.since.setdefault(number, self.env.now)
        elif not self._dispatching:
            self._dispatching = True
            Moment(self.env, 0.0, DISPATCH, self._dispatch)

    def _dispatch(self, _: object) -> None:
        self._dispatching = False
        while len(self.under_way) < self.max_in_flight:
            if self.switches.lazy and self.running:
                return
            pools: list[Any] = [getattr(rank, "pool", None) for rank in self.ranks]
            if agree := getattr(pools[0] and pools[0].policy, "agree", None):
                agree(pools)
            micros = [rank._form() for rank in self.ranks]
            since, self.since = self.since, {}
            if not any(micros):
                return
            step = RankStep(micros)
            times, _ = self.predict([micro and micro.batch for micro in micros])
            for number, micro in enumerate(micros):
                if micro is not None:
                    micro.times = times[number]
                    micro.ready_s = since.get(number, self.env.now)
                    self.ranks[number].micros.append(micro)
            self.under_way.append(step)
            self.running = True
            for store in self.stores:
                store.put(step)

    def _rank(self, number: int) -> Process:
        while True:
            step: RankStep = yield self.stores[number].get()
            start, micro = self.env.now, step.micros[number]
            layer_s = first_s = last_s = 0.0
            if micro is not None:
                factor = 1.0 if micro.factors is None else micro.factors[0]
                layer_s, first_s, last_s, _ = (float(quantize(factor * s)) for s in micro.times)
            for part_s in (first_s, *[layer_s] * self.layers, last_s):
                yield self.env.timeout(part_s)
                yield from self.barrier.meet()
            if micro is not None:
                micro.stages.extend((start, self.env.now))
            step.done += 1
            if step.done == len(self.ranks):
                self.env.process(self._return(step))
                if not self.stores[number].items:
                    self.running = False
                    self._wake()

    def _return(self, step: RankStep) -> Process:
        now = self.env.now
        for micro in step.micros:
            if micro is not None:
                micro.returned_s = now
        yield self.env.timeout(self.turnaround_s)
        self.under_way.remove(step)
        for rank, micro in zip(self.ranks, step.micros, strict=True):
            if micro is not None:
                rank._book(micro, now)
        for rank in self.ranks:
            for member in sorted(rank.everybody(), key=_admission):
                if member.finish_s >= 0 and member.request.id not in self._answered:
                    self._answered.add(member.request.id)
                    if self.answer is not None:
                        self.answer(member)
        self._wake()
