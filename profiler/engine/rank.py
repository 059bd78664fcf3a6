"""A process of an engine: ``python -m sarathi_sim.profiler.engine.rank``. Imports torch.

:mod:`sarathi_sim.profiler.engine.processes` starts one for each stage and tensor-parallel rank: a
shard, its links to the others, its log. Rank 0 holds the scheduler: it takes jobs from its parent,
forms micro-batches and runs the first stage. They go down the pipeline over torch.distributed
(gloo, and NCCL between GPUs); the last stage sends the tokens back to rank 0 over a local socket,
which can be polled. Every rank writes when each micro-batch arrived, started and finished on it, by
the one monotonic clock of the node.
"""

from __future__ import annotations

import argparse
import gc
import os
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sarathi_sim.policies.catalogue import build, of_micro_batches
from sarathi_sim.policies.micro_batches import MicroBatches
from ..planning.grid import ProfileError
from ..shard.environment import devices_on_node, facts, memory_bytes, open_device
from ..shard.rank_processes import LOST_A_PEER, channel_of_rank
from .driver import Book, Returned, Served, serve
from .links import Format, Inbox, Outbox
from .spec import EngineError, EngineSpec, Words, Work, read_spec
from .stage import Stage


@dataclass(frozen=True)
class Compute:
    """A device, and the communication of its ranks.

    ``backend`` is torch.distributed's. ``apart``: activations are separate messages from device to
    device; else they are sent with the words that describe them.
    """

    device: torch.device
    dtype: torch.dtype
    backend: str
    apart: bool

    def wait(self) -> None:
        """Wait for the work launched here, but not for transfers, which have streams of their own:
        they would delay a stage until the next one takes its activations."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def open_compute(spec: EngineSpec, number: int) -> Compute:
    """The device of rank ``number``, checked; a rank a GPU, counted as torch sees them.

    Raises EngineError where there are too few GPUs or too little memory, ProfileError where the
    device or its dtype cannot be used at all.
    """
    device, dtype = open_device(spec.device, spec.dtype, spec.threads)
    if spec.device == "cpu":
        if number == 0:
            _check_memory("all ranks together", spec, range(spec.ranks))
        return Compute(device, dtype, "gloo", apart=False)
    gpus = devices_on_node("cuda", spec.threads)
    if gpus < spec.ranks:
        raise EngineError(
            f"pp {spec.pp} times tp {spec.tp} needs {spec.ranks} GPUs, one a rank; torch sees "
            f"{gpus} on this node"
        )
    torch.cuda.set_device(number)
    _check_memory(f"rank {number}", spec, [number])
    # NCCL sends tensors between GPUs; gloo sends the words that describe them.
    return Compute(torch.device("cuda", number), dtype, "cpu:gloo,cuda:nccl", apart=True)


def _check_memory(who: str, spec: EngineSpec, ranks: range | list[int]) -> None:
    needed = sum(spec.bytes_needed(number) for number in ranks)
    free = memory_bytes(spec.device)[1]
    if needed > 0.9 * free:
        raise EngineError(
            f"the engine needs {needed / 1e9:.1f} GB for weights and KV caches of {spec.slots} "
            f"sequences of {spec.max_length} tokens ({who}), and {free / 1e9:.1f} GB are free: "
            "take fewer or shorter sequences, or a smaller model"
        )


WORK, FLUSH, STOP = 0, 1, 2
"""Kinds of messages: a work, the end of a run, the end of the engine."""

RESULT = struct.Struct("<idi")


def greedy(logits: torch.Tensor) -> tuple[list[int], float]:
    """The token of every row, and the smallest difference to the second-best logit."""
    if not len(logits):
        return [], float("inf")
    best = logits.topk(2, dim=-1)
    lead = best.values[:, 0] - best.values[:, 1]
    return best.indices[:, 0].tolist(), float(lead.min())


class Rank:
    """A stage's shard, its links, and its log."""

    def __init__(self, spec: EngineSpec, number: int, folder: Path, parent: Connection) -> None:
        self.spec, self.folder, self.parent = spec, folder, parent
        self.number = number
        self.stage_number, self.tp_rank = divmod(number, spec.tp)
        self.compute = compute = open_compute(spec, number)
        group = self._join()
        reduce = None if group is None else lambda tensor: dist.all_reduce(tensor, group=group)
        self._group = group
        shape = spec.stage(number)
        self.stage = Stage(shape, compute.device, compute.dtype, reduce)
        form = Format(spec.max_tokens, spec.most_words, spec.model.hidden_size, compute.dtype)
        depth = spec.pp + 1
        apart = compute.device if compute.apart else None
        self.inbox: Inbox | None = None
        # The first stage's other ranks get the works from rank 0; they need no activations.
        if self.stage_number > 0:
            self.inbox = Inbox(number - spec.tp, form, depth, apart)
        elif number > 0:
            self.inbox = Inbox(0, form.words_only(), depth)
        peers = range(1, spec.tp) if number == 0 else ()
        self.peers = [Outbox(peer, form.words_only(), depth) for peer in peers]
        self.next: Outbox | None = None
        if not shape.is_last:
            self.next = Outbox(number + spec.tp, form, depth, apart)
        self.back: Connection | None = None
        listener = None
        if number == 0 and spec.pp > 1:
            listener = Listener(str(folder / "tokens"), "AF_UNIX")
        if dist.is_initialized():
            # A barrier of the hosts; then one of the stage's ranks on their devices.
            dist.all_reduce(torch.zeros(1))
            if reduce is not None:
                reduce(torch.zeros(1, device=compute.device))
        if listener is not None:
            self.back = listener.accept()
        elif shape.is_last and self.tp_rank == 0 and number > 0:
            self.back = Client(str(folder / "tokens"), "AF_UNIX")
        time.sleep(0.003)  # lets the transport's threads run before the first burst
        self.rows: list[list[float]] = []

    def _join(self) -> Any:
        """Join the other ranks; returns the group of this stage's ranks, None for a single rank."""
        spec = self.spec
        world = spec.tp * spec.pp
        if world == 1:
            return None
        dist.init_process_group(
            self.compute.backend,
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
        """Execute arriving works until told to stop."""
        assert self.inbox is not None
        while True:
            words = self.inbox.receive()
            if words[0] == WORK:
                work = Work.decode(words[1:])
                x = None if self.stage_number == 0 else self.inbox.rows(work.num_tokens)
                self.compute.wait()
                self.execute(words, work, x, time.perf_counter())
                continue
            if self.next is not None:
                self.next.send(words)
                self.next.flush()
            if words[0] == STOP:
                return
            self.send_log()

    def execute(self, words: Words, work: Work, x: Tensor | None, arrived: float) -> None:
        """Run the stage, send the result to the next one, log it."""
        cpu = time.thread_time()
        began = time.perf_counter()
        out = self.stage.run(work, x)
        self.compute.wait()
        seconds = self.stage.seconds()  # of this stage's time: nothing else would account for it
        if self.next is not None:
            self.next.send(words, out)
            if self.spec.realtime:
                os.sched_yield()
            finish = time.perf_counter()
        else:
            tokens, margin = self._sample(out)
            finish = time.perf_counter()
            self.give_back(Returned(work.index, tokens, margin))
        busy = time.thread_time() - cpu
        self.rows.append([work.index, arrived, began, finish, busy, *seconds])

    def _sample(self, logits: Tensor) -> tuple[list[int], float]:
        """Greedy tokens over the parts of the vocabulary that the TP ranks hold."""
        if self._group is None or not len(logits):
            return greedy(logits)
        best = torch.full((len(logits), 2), float("-inf"), device=logits.device)
        ids = torch.zeros(len(logits), 2, dtype=torch.int64, device=logits.device)
        if logits.shape[1] >= 2:
            found = logits.float().topk(2, dim=-1)
            offset = self.tp_rank * self.spec.model.gemms(self.spec.tp)["lm_head"].n
            best, ids = found.values.contiguous(), found.indices + offset
        all_best = [torch.empty_like(best) for _ in range(self.spec.tp)]
        all_ids = [torch.empty_like(ids) for _ in range(self.spec.tp)]
        dist.all_gather(all_best, best, group=self._group)
        dist.all_gather(all_ids, ids, group=self._group)
        top = torch.cat(all_best, dim=1).topk(2, dim=-1)
        chosen = torch.cat(all_ids, dim=1).gather(1, top.indices[:, :1])[:, 0]
        return chosen.tolist(), float((top.values[:, 0] - top.values[:, 1]).min())

    def give_back(self, result: Returned) -> None:
        """Send a result to rank 0."""
        if self.back is not None:
            tokens = np.array(result.tokens, np.int32).tobytes()
            self.back.send_bytes(RESULT.pack(result.index, result.margin, len(tokens)) + tokens)

    def send_log(self) -> None:
        """Send the stage's log since the last time to the parent."""
        if self.tp_rank == 0:
            self.parent.send({"rows": self.rows})
        self.rows = []
        gc.collect()
        gc.disable()


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
        book = Book(requests, spec.slots, spec.model.vocab_size, spec.seed)
        policy = of_micro_batches(build(**job["policy"]))
        scheduler = MicroBatches(policy, endings=book, **job["scheduler"])
        return serve(requests, scheduler, self, book, progress=self._progress)

    def _play(self, job: dict[str, Any]) -> Served:
        """Synthetic works in a stream: ``[chunks, decodes]`` each, with made-up tokens."""
        rng, spec = np.random.default_rng(0), self.spec
        began = time.perf_counter()
        in_flight = 0
        for index, (chunks, decodes) in enumerate(job["works"]):
            rows = sum(chunk[1] for chunk in chunks) + len(decodes)
            tokens = rng.integers(spec.model.vocab_size, size=rows).astype(np.int32)
            work = Work(index, tuple(chunks), tuple(decodes), tokens)
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

    # The Executor's methods ----------------------------------------------------------------------

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
        """Return a result of a pipeline of one stage, whose last rank is this one."""
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


def main() -> None:
    """Join the others, then work until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m sarathi_sim.profiler.engine.rank")
    parser.add_argument("parent")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    spec = read_spec(options.spec)
    channel, jobs = channel_of_rank(options.spec.parent)
    if spec.realtime:  # before torch and gloo start threads, so that theirs have it
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    try:
        if options.rank == 0:
            Head(spec, options.spec.parent, channel, jobs).run()
        else:
            Rank(spec, options.rank, options.spec.parent, channel).run()
    except ProfileError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(2)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(LOST_A_PEER if lost_a_peer(error) else 1)
    os._exit(0)  # destroying a group can hang if a peer is gone already


def lost_a_peer(error: Exception) -> bool:
    """Whether a rank fails only because another one has ended: by the errors of sockets and
    groups."""
    named = any(backend in str(error) for backend in ("gloo", "NCCL"))
    return named or isinstance(error, EOFError | ConnectionError)


if __name__ == "__main__":
    main()
