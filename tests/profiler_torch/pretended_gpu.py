"""The pretended GPU for a whole process that runs a step of ``first-light``, or a rank of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.profiler_torch import fake_cuda

_for_good = ExitStack()  # never closed


@contextmanager
def no_numbers() -> Iterator[None]:
    """What asks the pretended GPU for one gets next to none; a mask is only a shape."""
    answers = {
        "item": lambda self: 1e-9,
        "__float__": lambda self: 1e-9,
        "triu": lambda self, *_: self,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, answer))
        yield


def pretend_for_good() -> None:
    """As :func:`fake_cuda.pretend` with :func:`no_numbers`, until the process ends."""
    _for_good.enter_context(fake_cuda.pretend())
    _for_good.enter_context(no_numbers())
    _for_good.enter_context(mock.patch.object(torch.cuda, "_sleep", lambda cycles: None))
