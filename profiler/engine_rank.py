"""One rank of an engine: ``python -m profiler.engine_rank``. Imports torch.

:mod:`profiler.engine_processes` starts one such process for each stage and tensor-parallel rank.
Rank 0 holds the scheduler: it takes jobs from standard input (a line of JSON each), forms
micro-batches and runs the first stage. They go down the pipeline over torch.distributed; the last
stage sends the tokens back to rank 0 over a local socket, which can be polled. Every rank writes
when each micro-batch arrived, started and finished on it, by the one monotonic clock of the node.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import struct
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from policies.catalogue import build
from policies.request import Request
from policies.scheduler import Scheduler
from profiler.driver import Returned, Served, serve
from profiler.engine import greedy
from profiler.engine_spec import EngineSpec, read_spec
from profiler.links import Format, Inbox, Outbox
from profiler.rank_processes import end_with_parent
from profiler.stage import Stage
from profiler.work import EngineError, SlotBook, Words, Work

_WORK, _FLUSH, _STOP = 0, 1, 2
_HEAD = struct.Struct("<idi")


def main() -> None:
    """Join the others, then work until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m profiler.engine_rank")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    spec = read_spec(options.spec)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    end_with_parent(jobs.put)
    if spec.realtime:  # before any thread is started, so that all have it
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    try:
        rank = Rank(spec, options.rank, options.spec.parent)
        if options.rank == 0:
            Head(rank, jobs).run()
        else:
            rank.run()
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(2)
    sys.stdout.flush()
    os._exit(0)  # destroying a group can hang where a peer is gone already


class Rank:
    """A stage's shard, its links, and its log."""

    def __init__(self, spec: EngineSpec, number: int, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.number = number
        self.stage_number, self.tp_rank = divmod(number, spec.tp)
        torch.set_num_threads(spec.threads)
        spec.check_memory(number)
        group = self._join()
        reduce = None if group is None else lambda tensor: dist.all_reduce(tensor, group=group)
        self._group = group
        shape = spec.stage(number)
        self.stage = Stage(shape, torch.device("cpu"), getattr(torch, spec.dtype), reduce)
        form = Format(
            spec.max_tokens, spec.slots, spec.model.hidden_size, getattr(torch, spec.dtype)
        )
        self.outboxes: list[Outbox] = []
        depth = spec.pp + 1
        self.inbox: Inbox | None = None
        if self.stage_number > 0:
            self.inbox = Inbox(number - spec.tp, form, depth)
        elif number > 0:
            self.inbox = Inbox(0, form, depth)
        # The first stage's other ranks get the works from rank 0; they need no activations.
        peers = range(1, spec.tp) if number == 0 else ()
        self.peers = [Outbox(peer, form, depth) for peer in peers]
        self.next = None if shape.is_last else Outbox(number + spec.tp, form, depth)
        self.form = form
        self.back: Connection | None = None
        listener = None
        if number == 0 and spec.pp > 1:
            listener = Listener(str(folder / "tokens"), "AF_UNIX")
        if dist.is_initialized():
            dist.barrier()
        if listener is not None:
            self.back = listener.accept()
        elif shape.is_last and self.tp_rank == 0 and number > 0:
            self.back = Client(str(folder / "tokens"), "AF_UNIX")
        time.sleep(0.003)  # lets the transport's threads run before the first burst
        self.rows: list[list[float]] = []

    def _join(self) -> Any:
        """Meet the other ranks; returns the group of this stage's, None where it is alone."""
        spec = self.spec
        world = spec.tp * spec.pp
        if world == 1:
            return None
        dist.init_process_group(
            "gloo",
            init_method=(self.folder / "store").absolute().as_uri(),
            rank=self.number,
            world_size=world,
            # Ranks may be idle for long between runs; silence is the parent's to judge.
            timeout=timedelta(hours=24),
        )
        if spec.tp == 1:
            return None
        stages = [
            dist.new_group(list(range(s * spec.tp, (s + 1) * spec.tp))) for s in range(spec.pp)
        ]
        return stages[self.stage_number]

    def run(self) -> None:
        """Execute what arrives until told to stop."""
        assert self.inbox is not None
        while True:
            message = self.inbox.receive()
            arrived = time.perf_counter()
            words = self.form.words(message)
            if words[0] == _WORK:
                work = Work.decode(words[1:])
                x = None if self.stage_number == 0 else self.form.rows(message, work.num_tokens)
                self.execute(words, work, x, arrived)
                continue
            if self.next is not None:
                self.next.send(words)
                self.next.flush()
            if words[0] == _STOP:
                return
            self.write_log(int(words[1]))

    def execute(self, words: Words, work: Work, x: Tensor | None, arrived: float) -> None:
        """Run the stage, hand the result on, log it."""
        cpu = time.thread_time()
        began = time.perf_counter()
        out = self.stage.run(work, x)
        if self.next is not None:
            self.next.send(words, out)
            if self.spec.realtime:
                os.sched_yield()
            finish = time.perf_counter()
        else:
            tokens, margin = self._sample(out)
            finish = time.perf_counter()
            self._give_back(Returned(work.index, tokens, margin))
        busy = time.thread_time() - cpu
        self.rows.append([work.index, arrived, began, finish, busy, *self.stage.seconds])

    def _sample(self, logits: Tensor) -> tuple[list[int], float]:
        """Greedy tokens over the parts of the vocabulary that the TP ranks hold."""
        if self._group is None:
            return greedy(logits)
        best = torch.full((len(logits), 2), float("-inf"), dtype=torch.float32)
        ids = torch.zeros(len(logits), 2, dtype=torch.int64)
        if logits.shape[1] >= 2:
            found = logits.float().topk(2, dim=-1)
            offset = self.tp_rank * self.spec.model.gemms(self.spec.tp)["lm_head"].n
            best, ids = found.values.contiguous(), found.indices + offset
        all_best = [torch.empty_like(best) for _ in range(self.spec.tp)]
        all_ids = [torch.empty_like(ids) for _ in range(self.spec.tp)]
        dist.all_gather(all_best, best, group=self._group)
        dist.all_gather(all_ids, ids, group=self._group)
        if not len(logits):
            return [], float("inf")
        top = torch.cat(all_best, dim=1).topk(2, dim=-1)
        chosen = torch.cat(all_ids, dim=1).gather(1, top.indices[:, :1])[:, 0]
        return chosen.tolist(), float((top.values[:, 0] - top.values[:, 1]).min())

    def _give_back(self, result: Returned) -> None:
        if self.back is not None:
            tokens = np.array(result.tokens, np.int32).tobytes()
            self.back.send_bytes(_HEAD.pack(result.index, result.margin, len(tokens)) + tokens)

    def write_log(self, number: int) -> None:
        """Write what this rank did since the last time, whole or not at all."""
        path = self.folder / f"run{number}.rank{self.number}.json"
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(self.rows), encoding="ascii")
        scratch.replace(path)
        self.rows = []
        gc.collect()
        gc.disable()


class Head(Rank):
    """Rank 0: takes jobs, schedules, and runs the first stage."""

    def __init__(self, rank: Rank, jobs: queue.SimpleQueue[bytes]) -> None:
        self.__dict__.update(rank.__dict__)
        self._jobs = jobs
        self._said = 0.0
        self._own: list[Returned] = []

    def run(self) -> None:
        """Say that all is ready, and do the jobs."""
        _say({"ready": True})
        while True:
            job = json.loads(self._jobs.get())
            if job["kind"] == "stop":
                self._command(_STOP)
                return
            result = self._play(job) if job["kind"] == "play" else asdict(self._serve(job))
            number = int(job["number"])
            self._command(_FLUSH, number)
            self.write_log(number)
            path = self.folder / f"run{number}.json"
            scratch = path.with_suffix(".part")
            scratch.write_text(json.dumps(result), encoding="utf-8")
            scratch.replace(path)
            _say({"done": number})

    def _serve(self, job: dict[str, Any]) -> Served:
        requests = [Request(*row) for row in job["requests"]]
        scheduler = Scheduler(build(**job["policy"]), **job["scheduler"])
        spec = self.spec
        book = SlotBook(requests, spec.slots, spec.model.vocab_size, spec.seed)
        return serve(requests, scheduler, self, book, progress=self._progress)

    def _play(self, job: dict[str, Any]) -> dict[str, Any]:
        """Synthetic works in a stream: ``[chunks, decodes]`` each, with made-up tokens."""
        rng = np.random.default_rng(0)
        began = time.perf_counter()
        in_flight = 0
        for index, (chunks, decodes) in enumerate(job["works"]):
            rows = sum(chunk[1] for chunk in chunks) + len(decodes)
            tokens = rng.integers(self.spec.model.vocab_size, size=rows).astype(np.int32)
            work = Work(index, tuple(map(tuple, chunks)), tuple(map(tuple, decodes)), tokens)
            while in_flight >= self.spec.pp:
                in_flight -= self.returned(None) is not None
            self.submit(work)
            in_flight += 1
            self._progress(index)
        while in_flight:
            in_flight -= self.returned(None) is not None
        return {"began": began}

    def _progress(self, done: int) -> None:
        now = time.monotonic()
        if now - self._said > 0.5:  # also the sign of life that the parent waits for
            self._said = now
            _say({"progress": done})

    def _command(self, *words: int) -> None:
        message = np.array(words, np.int32)
        for outbox in [*self.peers, *([self.next] if self.next is not None else [])]:
            outbox.send(message)
            outbox.flush()

    # What makes it an Executor -------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Run the first stage on a work, and send it on its way."""
        if work.num_tokens > self.spec.max_tokens:
            raise EngineError(
                f"a micro-batch of {work.num_tokens} tokens does not fit: the engine was started "
                f"with room for {self.spec.max_tokens}"
            )
        words = np.concatenate([np.array([_WORK], np.int32), work.encode()])
        for outbox in self.peers:
            outbox.send(words)
        self.execute(words, work, None, time.perf_counter())

    def _give_back(self, result: Returned) -> None:
        self._own.append(result)

    def returned(self, until: float | None = 0.0) -> Returned | None:
        """See :class:`profiler.driver.Executor`."""
        if self.next is None:
            return self._own.pop(0) if self._own else None
        assert self.back is not None
        left = None if until is None else max(0.0, until - time.perf_counter())
        if not self.back.poll(left):
            return None
        message = self.back.recv_bytes()
        index, margin, size = _HEAD.unpack_from(message)
        tokens = np.frombuffer(message, np.int32, size // 4, _HEAD.size)
        return Returned(index, tokens.tolist(), margin)


def _say(entry: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(entry) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
