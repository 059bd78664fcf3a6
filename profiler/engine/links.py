"""The messages between an engine's ranks: works and activations over torch.distributed.

On CPUs words and activations are one message. Receives are posted before their messages are sent,
into buffers in rotation, so that a send meets its receive and a transfer overlaps with what the
receiver computes. Between GPUs the activations are separate messages from device to device: NCCL
needs their size on both sides, which the receiver learns from the words. Imports torch.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .spec import EngineError, Words

_ALIGN = 64
#: Tells activations that travel apart from words, where a transport has tags (NCCL has none).
_APART = 1


class Format:
    """The layout of a message: words first, then rows of ``hidden`` numbers.

    ``max_tokens`` and ``most_words`` bound what one message can hold.
    """

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
    """Messages from one rank, in order; ``depth`` receives are posted at any time.

    With a ``device`` they are words alone, and the activations go straight to it.
    """

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
    """Messages to one rank; a buffer is reused after its message was taken.

    With a ``device`` they are words alone, and activations are sent from it.
    """

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
