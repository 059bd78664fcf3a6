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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

Task = tuple[int, int, str, float]


def main() -> int:
    """The command; its exit code is 0 if all counts are as wanted."""
    from tests.answers.asking import LIMIT_S, counts, table
    from tests.answers.questions import SEED

    parser = argparse.ArgumentParser(prog="python -m tests.answers", description=__doc__)
    parser.add_argument("--questions", type=int, default=100)
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
    tasks = [(number, options.seed, str(out), options.limit) for number in numbers]
    missing = [task for task in tasks if not _path(task).exists()]
    found = [json.loads(_path(task).read_text()) for task in tasks if task not in missing]
    began = time.monotonic()
    if found:
        print(f"{len(found)} of {len(tasks)} are judged already", file=sys.stderr)
    with _workers(min(options.jobs, len(missing) or 1)) as done:
        for number, one in enumerate(done(missing), 1):
            found.append(one)
            took = time.monotonic() - began
            left = took / number * (len(missing) - number)
            print(_line(one), file=sys.stderr)
            print(
                f"  {len(found)} of {len(tasks)}, {took:.0f} s, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
    found.sort(key=lambda one: str(one["name"]))
    counted = counts(found)
    _write(out / "judgements.json", {"counts": counted, "questions": found})
    print(table(counted))
    return 0 if _as_wanted(counted) else 1


def _as_wanted(counted: dict[str, Any]) -> bool:
    return not (
        counted["kept at the stated load (at least 0.95)"] < 0.95
        or counted["still kept above it (at most 0.10)"] > 0.10
        or counted["kept with one replica fewer (at most 0.10)"] > 0.10
        or counted["better deployments found (none)"]
        or counted["not settled (at most 5)"] > 5
        or counted["failed"]
    )


@contextmanager
def _workers(jobs: int) -> Iterator[Any]:
    """A function that judges questions, in whatever order they are done."""
    if jobs == 1:
        yield lambda tasks: map(_judged, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        yield lambda tasks: pool.imap_unordered(_judged, tasks, chunksize=1)


def _judged(task: Task) -> dict[str, Any]:
    """Ask and judge one question, and keep the judgement."""
    from tests.answers.asking import judgement_of
    from tests.answers.questions import question

    number, seed, _, limit_s = task
    asked, path = question(number, seed), _path(task)
    try:
        found = judgement_of(asked, path.parent, limit_s)
    except Exception:  # one question must not end the others; it counts as failed
        found = {"name": asked.name, "outcome": "failed", "seconds": 0.0}
        found["message"] = traceback.format_exc()
        return found
    _write(path, found)
    return found


def _path(task: Task) -> Path:
    return Path(task[2]) / f"q{task[0]:03d}" / "judgement.json"


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content, indent=1))
    scratch.replace(path)


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
