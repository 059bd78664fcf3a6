"""A worker process of a local sweep: ``python -m sarathi_sim.experiments.sweeps.worker PARENT``.

Standard input is a socket that it shares only with its parent. Bundles of jobs come in through it,
and results go back. The worker ends when its parent ends in any way.
"""

from __future__ import annotations

import gc
from contextlib import suppress

from sarathi_sim.profiler.storage.child import channel_to_parent, inbox

READY = "ready"
"""What a worker sends first, once everything is imported."""


def main() -> None:
    """Answer bundles until the parent ends."""
    channel = channel_to_parent()
    from sarathi_sim.experiments.sweeps.jobs import work

    gc.freeze()  # what was imported stays: a run's collections need not go through it
    with suppress(OSError):  # the parent is gone
        channel.send(READY)
        bundles = inbox(channel)
        while True:
            channel.send(work(bundles.get()))


if __name__ == "__main__":
    main()
