"""Python runs this at its start where this folder is on PYTHONPATH: the processes of the steps of
``first-light``, and those that they start, see the pretended GPU."""

import sys

OURS = ("sarathi_sim.profiler.", "sarathi_sim.experiments.lab.engines.first_light")
if any(word.startswith(OURS) for word in sys.orig_argv):
    from tests.profiler_torch.fake_cuda import pretend_for_good

    pretend_for_good()
