"""A process of an engine: ``python -m sarathi_sim.profiler.engine.main``. Imports torch.

:mod:`sarathi_sim.profiler.engine.processes` starts one for each stage and tensor-parallel rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from sarathi_sim.profiler.engine.head import Head
from sarathi_sim.profiler.engine.rank import Rank
from sarathi_sim.profiler.engine.spec import read_spec
from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.shard.rank_processes import LOST_A_PEER, channel_of_rank


def main() -> None:
    """Join the others, then work until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m sarathi_sim.profiler.engine.main")
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
    os._exit(0)  # destroying a group can hang where a peer is gone already


def lost_a_peer(error: Exception) -> bool:
    """Whether a rank fails only because another one has ended: by the errors of sockets and
    groups."""
    named = any(backend in str(error) for backend in ("gloo", "NCCL"))
    return named or isinstance(error, EOFError | ConnectionError)


if __name__ == "__main__":
    main()
