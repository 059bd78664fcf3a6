"""Python runs this at its start where this folder is on PYTHONPATH: the processes of the steps of
``first-light``, and those that they start, see the pretended GPU."""

import sys

if any(word.startswith("sarathi_sim.profiler.") for word in sys.orig_argv):
    from tests.profiler_torch.fake_cuda import pretend_for_good

    pretend_for_good()
