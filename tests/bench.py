"""``python -m tests.bench``: the event loop's speed beside that of a textbook simulation.

Both run in this process. The textbook (``tests/textbook/``) uses SimPy throughout. Times are of the
processor. Paged memory is compared with reserved memory, too. With --answers it times whole
commands instead, beside those of another commit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sarathi_sim.experiments.report.render import ProgressBar, consoles
from sarathi_sim.experiments.results import json_bytes
from sarathi_sim.profiler.storage.child import default_to_one_thread
from sarathi_sim.profiler.storage.strict import UserError

CONFIGS = ("gpt3_pp", "bench_paged")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 2 for what the user can correct."""
    default_to_one_thread()
    from sarathi_sim.experiments.config.loading import load_experiment
    from tests.benchmarks.answers import BEFORE, answers_table
    from tests.benchmarks.timing import bench_table, benchmark

    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, and no table")
    parser.add_argument(
        "--config",
        action="append",
        help="a configuration to time: its orca_pp and sarathi_pp, or all its scenarios; "
        f"may be repeated (default: {' '.join(CONFIGS)})",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="change a value"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed repeats, whose medians count (default: 3)"
    )
    parser.add_argument(
        "--answers", nargs="?", const=BEFORE, metavar="COMMIT", help=f"default: {BEFORE}"
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats: must be at least 1")
    stdout, stderr = consoles()
    if options.answers:
        with ProgressBar(stderr, enabled=True) as progress:
            print(answers_table(options.answers, options.repeats, progress))  # noqa: T201
        return 0
    try:
        experiments = [load_experiment(name, options.set) for name in options.config or CONFIGS]
        with ProgressBar(stderr, enabled=True) as progress:
            numbers = benchmark(experiments, options.repeats, progress)
    except UserError as error:
        parser.error(str(error))
    if options.json:
        sys.stdout.buffer.write(json_bytes(numbers))
    else:
        stdout.print(bench_table(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
