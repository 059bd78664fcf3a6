"""Python runs this at its start where this folder is on PYTHONPATH: the processes of the steps of
``first-light``, and those that they start, see the pretended GPU."""

import sys
from contextlib import ExitStack
from unittest import mock

if any(word.startswith("profiler.") for word in sys.orig_argv):
    import numpy as np
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    from tests.profiler_torch import fake_cuda

    stack = ExitStack()  # never closed: for as long as the process lives
    stack.enter_context(fake_cuda.pretend())
    # No number is computed: a difference is next to none, a token is 1, a mask is only a shape.
    for name in ("item", "__float__"):
        stack.enter_context(mock.patch.object(FakeTensor, name, lambda self: 1e-9))
    stack.enter_context(
        mock.patch.object(FakeTensor, "tolist", lambda self: np.ones(self.shape, int).tolist())
    )
    stack.enter_context(mock.patch.object(FakeTensor, "triu", lambda self, *_: self))
    stack.enter_context(mock.patch.object(torch.cuda, "_sleep", lambda cycles: None))
