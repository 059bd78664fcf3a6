"""Rank 0 of an engine: jobs come in, the scheduler decides, works go down the pipeline."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from sarathi_sim.policies.catalogue import build
from sarathi_sim.profiler.engine.book import Book
from sarathi_sim.profiler.engine.driver import Returned, Served, serve
from sarathi_sim.profiler.engine.rank import FLUSH, RESULT, STOP, WORK, Rank
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.engine.work import EngineError, Work
from sarathi_sim.profiler.shard.environment import facts


class Head(Rank):
    """Rank 0: takes jobs, schedules, and runs the first stage."""

    def __init__(
        self, spec: EngineSpec, folder: Path, parent: Connection, jobs: SimpleQueue[dict[str, Any]]
    ) -> None:
        super().__init__(spec, 0, folder, parent)
        self._jobs = jobs
        self._said = 0.0
        self._own: list[Returned] = []

    def run(self) -> None:
        """Report that all is ready, and do the jobs."""
        spec, stage = self.spec, self.stage
        known = facts(spec.device, spec.threads) | {"attention": stage.attention.name}
        if stage.no_xformers:
            known["no_xformers"] = stage.no_xformers
        self.parent.send({"ready": known})
        while True:
            job = self._jobs.get()
            if job["kind"] == "stop":
                self._command(STOP)
                return
            result = self._play(job) if job["kind"] == "play" else self._serve(job)
            self._command(FLUSH)
            self.parent.send({"done": result})
            self.send_log()

    def _serve(self, job: dict[str, Any]) -> Served:
        requests, spec = job["requests"], self.spec
        blocks, block_size = spec.blocks
        book = Book(
            requests, job["num_blocks"] or blocks + 1, block_size,
            vocab_size=spec.model.vocab_size, seed=spec.seed,
            prefix_caching=job["prefix_caching"], eos=job["eos"],
        )  # fmt: skip
        scheduler = book.scheduler(build(**job["policy"]), job["scheduler"])
        return serve(requests, scheduler, self, book, progress=self._progress)

    def _play(self, job: dict[str, Any]) -> Served:
        """Synthetic works in a stream: ``[chunks, decodes]`` each, with made-up tokens."""
        rng, spec = np.random.default_rng(0), self.spec
        began = time.perf_counter()
        in_flight = 0
        for index, (chunks, decodes) in enumerate(job["works"]):
            rows = sum(chunk[1] for chunk in chunks) + len(decodes)
            tokens = rng.integers(spec.model.vocab_size, size=rows).astype(np.int32)
            work = Work(
                index,
                tuple((spec.table(slot), *rest) for slot, *rest in chunks),
                tuple((spec.table(slot), context) for slot, context in decodes),
                tokens,
            )
            while in_flight >= spec.pp:
                in_flight -= self.returned(None) is not None
            self.submit(work)
            in_flight += 1
            self._progress(index)
        while in_flight:
            in_flight -= self.returned(None) is not None
        return Served(began)

    def _progress(self, done: int) -> None:
        now = time.monotonic()
        if now - self._said > 0.5:  # also the sign of life that the parent waits for
            self._said = now
            self.parent.send({"progress": done})

    def _command(self, word: int) -> None:
        message = np.array([word], np.int32)
        for outbox in [*self.peers, *([self.next] if self.next is not None else [])]:
            outbox.send(message)
            outbox.flush()

    # What makes it an Executor -------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Run the first stage on a work, and send it to the next one."""
        if work.num_tokens > self.spec.max_tokens:
            raise EngineError(
                f"a micro-batch of {work.num_tokens} tokens does not fit: the engine was started "
                f"with room for {self.spec.max_tokens}"
            )
        words = np.concatenate([np.array([WORK], np.int32), work.encode()])
        for outbox in self.peers:
            outbox.send(words)
        self.execute(words, work, None, time.perf_counter())

    def give_back(self, result: Returned) -> None:
        """Of a pipeline of one stage, whose last rank is this one."""
        self._own.append(result)

    def returned(self, until: float | None = 0.0) -> Returned | None:
        """See :class:`sarathi_sim.profiler.engine.driver.Executor`."""
        if self.next is None:
            return self._own.pop(0) if self._own else None
        assert self.back is not None
        left = None if until is None else max(0.0, until - time.perf_counter())
        if not self.back.poll(left):
            return None
        message = self.back.recv_bytes()
        index, margin, size = RESULT.unpack_from(message)
        tokens = np.frombuffer(message, np.int32, size // 4, RESULT.size)
        return Returned(index, tokens.tolist(), margin)
