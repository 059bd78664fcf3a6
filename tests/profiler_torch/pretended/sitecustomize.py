"""Python runs this at its start where this folder is on PYTHONPATH: the processes of the steps of
``first-light``, and those that they start, see the pretended GPU."""

import sys
from contextlib import ExitStack
from unittest import mock

if any(word.startswith("profiler.") for word in sys.orig_argv):
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    from tests.profiler_torch import fake_cuda

    stack = ExitStack()  # never closed: for as long as the process lives
    stack.enter_context(fake_cuda.pretend())
    # No number is computed: no difference is found, and a mask is only a shape.
    stack.enter_context(mock.patch.object(FakeTensor, "item", lambda self: 0.0))
    stack.enter_context(mock.patch.object(FakeTensor, "triu", lambda self, *_: self))
    stack.enter_context(mock.patch.object(torch.cuda, "_sleep", lambda cycles: None))
