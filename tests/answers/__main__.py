"""``python -m tests.answers``: are the answers of ``capacity`` and ``recommend`` true?

Random questions from a fixed seed are asked on the command line. What is named first and second
runs again with other seeds and five times the requests. The table counts the answers that keep
their SLO at the stated load, those that still keep it well above, spaces where brute force finds
something better, and questions that were left open. Judgements that are there already are kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.answers.asking import Task

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


def main() -> int:
    """The command; its exit code is 0 if all counts are as wanted."""
    from tests.answers.asking import LIMIT_S, counts, path_of, table, write_json
    from tests.answers.questions import SEED

    parser = argparse.ArgumentParser(prog="python -m tests.answers", description=__doc__)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path("runs/answers"))
    parser.add_argument(
        "--only", type=int, action="append", help="only the question of that number"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a command")
    options = parser.parse_args()
    out = options.out.resolve() / str(options.seed)
    numbers = options.only or range(options.questions)
    tasks: list[Task] = [(number, options.seed, str(out), options.limit) for number in numbers]
    missing = [task for task in tasks if not path_of(task).exists()]
    found = [json.loads(path_of(task).read_text()) for task in tasks if task not in missing]
    began = time.monotonic()
    if found:
        print(f"{len(found)} of {len(tasks)} are judged already", file=sys.stderr)
    for number, one in enumerate(_done(missing, min(options.jobs, len(missing) or 1)), 1):
        found.append(one)
        took = time.monotonic() - began
        left = took / number * (len(missing) - number)
        progress = f"  {len(found)} of {len(tasks)}, {took:.0f} s, about {left:.0f} s left"
        print(_line(one), progress, sep="\n", file=sys.stderr, flush=True)
    found.sort(key=lambda one: str(one["name"]))
    counted = counts(found)
    write_json(out / "judgements.json", {"counts": counted, "questions": found})
    print(table(counted))
    return 0 if _as_wanted(counted) else 1


def _as_wanted(counted: dict[str, Any]) -> bool:
    kept = counted["kept at the stated load (at least 0.95)"]
    few = ("still kept above it (at most 0.10)", "kept with one replica fewer (at most 0.10)")
    return (
        (kept is None or kept >= 0.95)
        and all((counted[key] or 0.0) <= 0.10 for key in few)
        and not counted["better deployments found (none)"]
        and counted["not settled (at most 5)"] <= 5
        and not counted["failed"]
    )


def _done(tasks: list[Task], jobs: int) -> Iterator[dict[str, Any]]:
    """The judgements, in whatever order they are done."""
    from tests.answers.asking import judged_task

    if jobs == 1:
        yield from map(judged_task, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(judged_task, task) for task in tasks]):
            yield done.result()


def _line(one: dict[str, Any]) -> str:
    """A question's judgement in a line."""
    at = " ".join(
        f"{'kept' if each['nearly'] else 'BROKEN'} ({max(each['parts'].values()):.2f})"
        for each in one.get("at", [])
    )
    above = " ".join("KEPT" if each["keeps"] else "broken" for each in one.get("above", []))
    better = sum(bool(each.get("keeps")) for each in one.get("brute", []))
    parts = [one["name"], one["outcome"], f"{one['seconds']:.0f} s"]
    parts += [f"at {at}"] if at else []
    parts += [f"above {above}"] if above else []
    parts += [f"{better} BETTER"] if better else []
    parts += [str(one["message"]).splitlines()[-1][:160]] if one.get("message") else []
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
