"""The textbook's pipeline: a process for each stage and each link, a Store in front of each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.simulator.loop.clock import DISPATCH, Moment, quantize
from sarathi_sim.simulator.loop.pipeline import Jitter
from sarathi_sim.simulator.loop.records import Switches
from sarathi_sim.simulator.loop.replica import Predictor

Process = Generator[simpy.Event, Any, None]


@dataclass(eq=False, slots=True)
class Member:
    """A request, how far it has come, and the batches it was in."""

    request: Request
    sequence: Sequence
    generated: int = 0
    first_token_s: float = -1.0
    finish_s: float = -1.0
    iterations: array[int] = field(default_factory=lambda: array("q"))

    @property
    def context(self) -> int:
        return self.sequence.prefilled + max(0, self.generated - 1)


@dataclass(eq=False, slots=True)
class Micro:
    """One micro-batch on its way. ``stages`` is its start and finish on each stage, in turn."""

    index: int
    slot: int
    ready_s: float
    batch: Batch
    chunks: list[tuple[Member, int]]
    decodes: list[Member]
    padding: list[Member]
    times: tuple[float, float, float, float]
    factors: list[float] | None
    stages: array[float] = field(default_factory=lambda: array("d"))
    returned_s: float = -1.0


class TextbookPipeline:
    """A pipeline of processes.

    A subclass takes requests (``submit``), lists those accepted (``everybody``), forms the batches
    (``_form``: the next one, or None), and books their results (``_book``, with when it returned).
    """

    def __init__(
        self,
        env: simpy.Environment,
        predict: Predictor,
        layers: tuple[int, ...],
        switches: Switches,
        jitter: Jitter | None,
    ) -> None:
        self.env = env
        self.predict = predict
        self.layers = layers
        self.lazy = switches.lazy
        self.blocking_send = switches.blocking_send
        self.turnaround_s = float(quantize(switches.turnaround_s))
        self.jitter = jitter
        self.rejected: list[int] = []
        self.answer: Callable[[Member], None] | None = None  # told of each that finished
        self._answered: set[int] = set()
        self.micros: list[Micro] = []
        self.stage0_busy = False
        self._dispatching = False
        self._wake: Callable[[], None] = self._dispatch_now  # (of ranks, all form together)
        self.stores = [simpy.Store(env) for _ in layers]
        self.links = [simpy.Store(env) for _ in layers[1:]]
        for stage in range(len(layers)):
            env.process(self._stage(stage))
        for hop in range(len(layers) - 1):
            env.process(self._link(hop))

    def _micro(
        self,
        batch: Batch,
        chunks: list[tuple[Member, int]],
        decodes: list[Member],
        padding: list[Member],
    ) -> Micro:
        """The batch as it goes through the pipeline."""
        times, index = self.predict(batch), len(self.micros)
        for member in decodes + [m for m, _ in chunks]:
            member.iterations.append(index)
        factors = None if self.jitter is None else self.jitter.factors()
        now = self.env.now
        return Micro(index, batch.slot, now, batch, chunks, decodes, padding, times, factors)

    def _dispatch_now(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            Moment(self.env, 0.0, DISPATCH, self._dispatch)

    def _dispatch(self, _: object) -> None:
        self._dispatching = False
        while not (self.lazy and self.stage0_busy):
            micro = self._form()
            if micro is None:
                return
            self.micros.append(micro)
            self.stage0_busy = True
            self.stores[0].put(micro)

    def _stage(self, stage: int) -> Process:
        last = len(self.layers) - 1
        while True:
            micro: Micro = yield self.stores[stage].get()
            layer_s, first_s, last_s, send_s = micro.times
            duration = self.layers[stage] * layer_s
            if stage == 0:
                duration += first_s
            if stage == last:
                duration += last_s
            if micro.factors is not None:
                duration = float(quantize(duration * micro.factors[stage]))
            start = self.env.now
            yield self.env.timeout(duration)
            micro.stages.extend((start, self.env.now))
            if stage == last:
                self.env.process(self._return(micro))
            elif self.blocking_send:
                yield self.env.timeout(send_s)
                self.stores[stage + 1].put(micro)
            else:
                self.links[stage].put((micro, self.env.now + send_s))
            if stage == 0 and not self.stores[0].items:
                self.stage0_busy = False
                self._wake()

    def _link(self, hop: int) -> Process:
        while True:
            micro, arrival = yield self.links[hop].get()
            if arrival > self.env.now:
                yield self.env.timeout(arrival - self.env.now)
            self.stores[hop + 1].put(micro)

    def _return(self, micro: Micro) -> Process:
        now = micro.returned_s = self.env.now
        yield self.env.timeout(self.turnaround_s)
        self._book(micro, now)
        if self.answer is not None:
            # Answers of one instant go out in the order of admission, where there is one.
            for member in sorted(self.everybody(), key=_admission):
                if member.finish_s >= 0 and member.request.id not in self._answered:
                    self._answered.add(member.request.id)
                    self.answer(member)
        self._wake()


def _admission(member: Member) -> int:
    sequence = getattr(member, "sequence", None)
    return 0 if sequence is None else sequence.order
