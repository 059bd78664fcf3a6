"""``python -m tests.hostile``: does any input end in a traceback, a hang, or the loss of a file?

Every known and 10,000 generated inputs go through all doors: configurations, models, devices,
bundles, traces, tables of servers, files of load tools, calibrations, logs, policies, ``--set``,
results and output folders, and reports of every kind of result. Each command must end in exit code
0 or 2 (or 1 where its page says so; 70, an error of ours, is a fault), within 20 seconds; a mistake
is one line; and no file of the user's changes. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many are generated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--door", action="append", help="only this door; may be repeated")
    parser.add_argument("--only", type=int, help="only the input of that number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    from tests.hostile.box import empty
    from tests.hostile.harness import Harness, inputs

    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        harness = Harness(scratch, options.seed)
        tried = inputs(options.inputs, options.door)
        if options.only is not None:
            tried = [what for what in tried if what.which == options.only]
        report = harness.try_all(tried, options.jobs, lambda n: _tell(n, len(tried), began))
    finally:
        empty(scratch)
    print(report.table())
    kinds: Counter[str] = Counter()
    for what, outcome, argv in report.bad:
        kind = f"{outcome.word}: {outcome.detail.strip()[-400:]}"
        kinds[kind] += 1
        if kinds[kind] == 1:
            print(f"\n{what.door} {what.which}: {' '.join(argv)[:300]!a}\n    {kind!a}")
    print(f"\n{len(tried)} inputs, {len(report.bad)} ended badly, {time.monotonic() - began:.0f} s")
    return 1 if report.bad else 0


def _tell(done: int, total: int, began: float) -> None:
    if done % 500 == 0:
        print(f"{done} of {total}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
