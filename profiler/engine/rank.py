"""A process of an engine: ``python -m sarathi_sim.profiler.engine.rank``. Imports torch.

:mod:`sarathi_sim.profiler.engine.processes` starts one for each stage and tensor-parallel rank: a
:class:`Stage`, its links to the others, its log. Rank 0 holds the scheduler: it takes jobs from its
parent, forms micro-batches and runs the first stage. They go down the pipeline over
torch.distributed (gloo, and NCCL between GPUs); the last stage sends the tokens back to rank 0 over
a local socket, which can be polled. Every rank writes when each micro-batch arrived, started and
finished on it, by the one monotonic clock of the node.

On CPUs words and activations are one message. Receives are posted before their messages are sent,
into buffers in rotation, so that a send meets its receive and a transfer overlaps with what the
receiver computes. Between GPUs the activations are separate messages from device to device: NCCL
needs their size on both sides, which the receiver learns from the words.
"""

from __future__ import annotations

import argparse
import gc
import os
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
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
from ..facts.ops import OTHERS
from ..planning.grid import ProfileError
from ..shard.attention import Chunk, Decodes, KVCache, Rows, choose_attention
from ..shard.environment import devices_on_node, facts, memory_bytes, open_device
from ..shard.layer import (
    EMBEDDING,
    LM_HEAD,
    LayerState,
    RandomWeights,
    ShardLayer,
)
from ..shard.rank_processes import LOST_A_PEER, channel_of_rank
from ..shard.timing import cuda_events
from .driver import Book, Returned, Served, serve
from .spec import TIMED_OPS, EngineError, EngineSpec, StageShape, Words, Work, read_spec

_ALIGN = 64
#: Tells activations that travel apart from words, where a transport has tags (NCCL has none).
_APART = 1


class Format:
    """The layout of a message: words first, then rows of ``hidden`` numbers. ``max_tokens`` and
    ``most_words`` bound what one message can hold."""

    def __init__(self, max_tokens: int, most_words: int, hidden: int, dtype: torch.dtype) -> None:
        self.max_tokens, self.most_words = max_tokens, most_words
        self.hidden, self.dtype = hidden, dtype
        self.num_bytes = _round_up(4 * (1 + self.most_words)) + max_tokens * hidden * dtype.itemsize

    def words_only(self) -> Format:
        """For messages without rows."""
        return Format(self.max_tokens, self.most_words, 0, self.dtype)

    def buffer(self) -> Tensor:
        """Room for one message."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8)

    def pack(self, buffer: Tensor, words: Words, x: Tensor | None) -> Tensor:
        """Fill the buffer; returns the part of it to send. Raises EngineError where it is full."""
        rows = 0 if x is None else len(x)
        if len(words) > self.most_words or rows > self.max_tokens:
            raise EngineError(
                f"a micro-batch of {rows} tokens does not fit: the engine was started with room "
                f"for {self.max_tokens}"
            )
        header = np.concatenate([np.array([len(words)], np.int32), words])
        buffer[: header.nbytes].view(torch.int32).copy_(torch.from_numpy(header))
        start = _round_up(header.nbytes)
        if x is None:
            return buffer[:start]
        end = start + x.numel() * self.dtype.itemsize
        buffer[start:end].view(self.dtype).view(x.shape).copy_(x)
        return buffer[:end]

    def words(self, buffer: Tensor) -> Words:
        """The words of a message, copied."""
        count = int(buffer[:4].view(torch.int32).item())
        found: Words = buffer[4 : 4 * (1 + count)].view(torch.int32).numpy().copy()
        return found

    def rows(self, buffer: Tensor, count: int) -> Tensor:
        """``count`` rows of the message's numbers, in place."""
        start = _round_up(4 * (1 + int(buffer[:4].view(torch.int32).item())))
        end = start + count * self.hidden * self.dtype.itemsize
        return buffer[start:end].view(self.dtype).view(count, self.hidden)


class Inbox:
    """Messages from one rank, in order; ``depth`` receives are posted at any time. With a
    ``device`` they are words alone, and the activations go straight to it."""

    def __init__(
        self, source: int, form: Format, depth: int, device: torch.device | None = None
    ) -> None:
        self._source, self._device = source, device
        self._hidden, self._dtype = form.hidden, form.dtype
        self._form = form if device is None else form.words_only()
        self._read: Tensor | None = None
        self._posted = deque(self._post(self._form.buffer()) for _ in range(depth))
        if device is not None:
            self.rows(1)  # NCCL meets the peer now, not in the middle of the first run

    def _post(self, buffer: Tensor) -> tuple[Tensor, dist.Work]:
        work = dist.irecv(buffer, self._source)
        assert work is not None
        return buffer, work

    def receive(self) -> Words:
        """Wait for the next message; returns its words."""
        if self._read is not None:
            self._posted.append(self._post(self._read))
        self._read, work = self._posted.popleft()
        work.wait()
        return self._form.words(self._read)

    def rows(self, count: int) -> Tensor:
        """The activations (count, hidden) of that message, valid until the next is received."""
        if self._device is None:
            assert self._read is not None
            return self._form.rows(self._read, count)
        x = torch.empty(count, self._hidden, dtype=self._dtype, device=self._device)
        if count:
            work = dist.irecv(x, self._source, tag=_APART)
            assert work is not None
            work.wait()
        return x


class Outbox:
    """Messages to one rank; a buffer is reused after its message was taken. With a ``device`` they
    are words alone, and activations are sent from it."""

    def __init__(
        self, target: int, form: Format, depth: int, device: torch.device | None = None
    ) -> None:
        self._target, self._apart = target, device is not None
        self._form = form.words_only() if self._apart else form
        self._buffers = deque(self._form.buffer() for _ in range(depth))
        self._sending: deque[dist.Work] = deque()
        # Messages in flight must stay in memory until they arrive.
        self._going: deque[tuple[Tensor, dist.Work]] = deque()
        if device is not None:
            self._send(torch.zeros(1, form.hidden, dtype=form.dtype, device=device))

    def send(self, words: Words, x: Tensor | None = None) -> None:
        """Start sending a message, or both."""
        if len(self._sending) == len(self._buffers):
            self._sending.popleft().wait()
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        packed = self._form.pack(buffer, words, None if self._apart else x)
        work = dist.isend(packed, self._target)
        assert work is not None
        self._sending.append(work)
        if self._apart and x is not None and len(x):
            self._send(x)

    def _send(self, x: Tensor) -> None:
        if len(self._going) == len(self._buffers):
            self._going.popleft()[1].wait()
        x = x.contiguous()
        work = dist.isend(x, self._target, tag=_APART)
        assert work is not None
        self._going.append((x, work))

    def flush(self) -> None:
        """Wait until all messages are received."""
        while self._sending:
            self._sending.popleft().wait()
        while self._going:
            self._going.popleft()[1].wait()


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


class Stopwatch:
    """Splits the work of a stage on ``device`` into laps, by the host's clock or, on a GPU, by
    events in its stream.

    On a GPU the wait for a launch counts for the next lap. The host does not wait for laps, but
    recording one takes about as long as launching a kernel. Events are reused, because making one
    takes as long again.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self._names: list[str] = []

    def start(self) -> None:
        """Forget all laps; time runs from here."""
        self._names.clear()
        if self._on_gpu:
            self._stream = torch.cuda.current_stream()  # asking for it takes longer than recording
        self._mark()

    def lap(self, name: str) -> None:
        """All work since the last lap, or the start, was ``name``."""
        self._names.append(name)
        self._mark()

    def _mark(self) -> None:
        at = len(self._names)
        if at == len(self._marks):
            self._marks += cuda_events() if self._on_gpu else (0.0, 0.0)
        if self._on_gpu:
            self._marks[at].record(self._stream)
        else:
            self._marks[at] = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds by name, summed over the laps; on a GPU, waits for the last one."""
        marks = self._marks[: len(self._names) + 1]
        if self._on_gpu:
            marks[-1].synchronize()
        spent: dict[str, float] = {}
        for name, (begin, end) in zip(self._names, pairwise(marks), strict=True):
            seconds = begin.elapsed_time(end) * 1e-3 if self._on_gpu else end - begin
            spent[name] = spent.get(name, 0.0) + seconds
        return spent


class Stage:
    """Executes works. ``reduce`` sums a tensor over the stage's TP ranks, in place."""

    def __init__(
        self,
        shape: StageShape,
        device: torch.device,
        dtype: torch.dtype,
        reduce: Callable[[Tensor], object] | None = None,
    ) -> None:
        model = shape.model
        self.shape, self.device, self.dtype = shape, device, dtype
        drawn = RandomWeights(model, shape.tp, shape.rank, device, dtype, shape.seed)
        self.layer = layer = ShardLayer(model, shape.tp, device, dtype, reduce)
        sizes = (layer.kv_heads, model.head_dim)
        self.attention, self.no_xformers = choose_attention(device, dtype, layer.heads, *sizes)
        tokens = shape.slots * shape.max_length
        self.layers = [
            LayerState(drawn.layer(index), KVCache(tokens, *sizes, device, dtype))
            for index in range(shape.first, shape.last)
        ]
        self.ends = drawn.ends(shape.is_first, shape.is_last)
        self._watch = Stopwatch(device)

    def run(self, work: Work, x: Tensor | None = None) -> Tensor:
        """Activations (tokens, hidden) for the next stage; on the last one logits of the yielding
        rows. ``x`` comes from the previous stage, and is left out on the first. Logits are
        (outputs, this rank's part of the vocabulary)."""
        self._watch.start()
        if not work.num_tokens:  # an empty work only keeps its place in the pipeline
            width = self.ends.columns if self.shape.is_last else self.shape.model.hidden_size
            return torch.empty(0, width, device=self.device, dtype=self.dtype)
        with torch.inference_mode():
            return self.layer.forward(
                self.layers,
                self.ends,
                self._rows(work),
                x,
                self._do,
            )

    def _do(self, op: str, call: Callable[..., Any], state: object, *inputs: Any) -> Any:
        out = call(state, *inputs)
        self._watch.lap(op)
        return out

    def seconds(self) -> list[float]:
        """Seconds of the last work: :data:`TIMED_OPS` over all layers, all layers, the LM head. A
        GPU's times are its own; its wait for a launch counts for the next op."""
        spent = self._watch.read()
        spent.pop(EMBEDDING, None)
        head = spent.pop(LM_HEAD, 0.0)
        return [
            *(spent.get(op, 0.0) for op in TIMED_OPS),
            sum(spent.values()),
            head,
        ]

    def _rows(self, work: Work) -> Rows:
        """The inputs that all layers share; row indices count as embedding, the rest apart."""
        shape, device = self.shape, self.device
        parts = [torch.arange(context, context + count) for _, count, context, _ in work.chunks]
        if work.decodes:
            parts.append(torch.tensor([context for _, context in work.decodes]))
        positions = torch.cat(parts).to(device)
        tokens = torch.from_numpy(work.tokens).to(device) if shape.is_first else None
        outputs = self._outputs_of(work) if shape.is_last else None
        self._watch.lap(EMBEDDING)
        rows = Rows(
            self.layer.angles(positions),
            [
                Chunk(self.attention, count, context, slot * shape.max_length)
                for slot, count, context, _ in work.chunks
            ],
            Decodes.in_blocks(
                self.attention, work.decodes, shape.slots, shape.max_length, device
            )
            if work.decodes
            else None,
            positions, tokens, outputs,
        )  # fmt: skip
        self._watch.lap(OTHERS)
        return rows

    def _outputs_of(self, work: Work) -> Tensor:
        rows = []
        first = 0
        for _, count, _, yields in work.chunks:
            first += count
            rows += [first - 1] * yields
        rows += range(first, first + len(work.decodes))
        return torch.tensor(rows, dtype=torch.int64).to(self.device)


@dataclass(frozen=True)
class Compute:
    """A device, and the communication of its ranks. ``backend`` is torch.distributed's. ``apart``:
    activations are separate messages from device to device; else they are sent with the words that
    describe them."""

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
    """The device of rank ``number``, checked; a rank a GPU, counted as torch sees them. Raises
    EngineError where there are too few GPUs or too little memory, ProfileError where the device or
    its dtype cannot be used at all."""
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
        best = torch.full(
            (len(logits), 2),
            float("-inf"),
            device=logits.device,
        )
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
            self.back.send_bytes(
                RESULT.pack(
                    result.index,
                    result.margin,
                    len(tokens),
                )
                + tokens
            )

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
