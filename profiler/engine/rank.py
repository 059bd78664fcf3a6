"""One rank of an engine: a shard, its links to the others, its log. Imports torch.

Rank 0 holds the scheduler: it takes jobs from its parent, forms
micro-batches and runs the first stage. They go down the pipeline over torch.distributed (gloo, and
NCCL between GPUs); the last stage sends the tokens back to rank 0 over a local socket, which can be
polled. Every rank writes when each micro-batch arrived, started and finished on it, by the one
monotonic clock of the node.
"""

from __future__ import annotations

import gc
import os
import struct
import time
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sarathi_sim.profiler.engine.compute import open_compute
from sarathi_sim.profiler.engine.driver import Returned
from sarathi_sim.profiler.engine.links import DeviceInbox, DeviceOutbox, Format, Inbox, Outbox
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.engine.stage import Stage
from sarathi_sim.profiler.engine.work import Words, Work

WORK, FLUSH, STOP = 0, 1, 2
"""What a message is: a work, the end of a run, the end."""

RESULT = struct.Struct("<idi")


def greedy(logits: torch.Tensor) -> tuple[list[int], float]:
    """The token of every row, and the smallest lead over the second best."""
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
        self.inbox: Inbox | None = None
        # The first stage's other ranks get the works from rank 0; they need no activations.
        if self.stage_number > 0:
            self.inbox = self._inbox(number - spec.tp, form, depth)
        elif number > 0:
            self.inbox = Inbox(0, form.words_only(), depth)
        peers = range(1, spec.tp) if number == 0 else ()
        self.peers = [Outbox(peer, form.words_only(), depth) for peer in peers]
        self.next: Outbox | None = None
        if not shape.is_last:
            self.next = self._outbox(number + spec.tp, form, depth)
        self.back: Connection | None = None
        listener = None
        if number == 0 and spec.pp > 1:
            listener = Listener(str(folder / "tokens"), "AF_UNIX")
        if dist.is_initialized():
            # A barrier of the host's; and the stage's ranks meet where they compute.
            dist.all_reduce(torch.zeros(1))
            if reduce is not None:
                reduce(torch.zeros(1, device=compute.device))
        if listener is not None:
            self.back = listener.accept()
        elif shape.is_last and self.tp_rank == 0 and number > 0:
            self.back = Client(str(folder / "tokens"), "AF_UNIX")
        time.sleep(0.003)  # lets the transport's threads run before the first burst
        self.rows: list[list[float]] = []

    def _inbox(self, source: int, form: Format, depth: int) -> Inbox:
        if self.compute.apart:
            return DeviceInbox(source, form, depth, self.compute.device)
        return Inbox(source, form, depth)

    def _outbox(self, target: int, form: Format, depth: int) -> Outbox:
        if self.compute.apart:
            return DeviceOutbox(target, form, depth, self.compute.device)
        return Outbox(target, form, depth)

    def _join(self) -> Any:
        """Meet the other ranks; returns the group of this stage's, None where it is alone."""
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
        """Execute what arrives until told to stop."""
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
