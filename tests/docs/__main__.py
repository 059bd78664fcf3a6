"""``python -m tests.docs``: does every command of README.md and docs/**/*.md run as printed?

Each page runs from top to bottom in a fresh folder, word for word. What it shows as output is
compared with what was printed; ``--update`` puts the printed numbers into the page. What needs a
GPU, vLLM or the public measurements, and times on a clock, are marked in the page (``page.py``).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.page import PAGES, ROOT
from tests.docs.runner import NEEDS, run_page


class Bash:
    """Runs lines in a shell where ``sarathi-sim`` is this checkout's."""

    def __init__(self, bin_folder: Path, limit_s: float) -> None:
        program = bin_folder / "sarathi-sim"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sarathi_sim "$@"\n')
        program.chmod(0o755)
        path = os.pathsep.join([str(bin_folder), str(Path(sys.executable).parent)])
        self.limit_s = limit_s
        self.environment = os.environ | {
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "MPLBACKEND": "agg",
        }
        self.background: list[subprocess.Popen[bytes]] = []

    def __call__(self, line: str, folder: Path) -> tuple[int, str]:
        began = time.monotonic()
        if line.endswith(" &"):
            started = subprocess.Popen(
                ["bash", "-c", f"exec {line.removesuffix(' &')}"],
                cwd=folder, env=self.environment, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self.background.append(started)
            return 0, ""
        ran = subprocess.Popen(
            ["bash", "-c", line], cwd=folder, env=self.environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        )  # fmt: skip
        try:
            said, _ = ran.communicate(timeout=self.limit_s)
        except BaseException as error:
            os.killpg(ran.pid, signal.SIGKILL)
            said, _ = ran.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        print(f"  {time.monotonic() - began:6.1f} s  exit {ran.returncode}  {line}", flush=True)
        return ran.returncode, said

    def end(self) -> None:
        for process in self.background:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> int:
    """The command; its exit code is 0 if all pages run as printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs", description=__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE", help="as README.md")
    parser.add_argument("--update", action="store_true", help="put what was printed into the pages")
    parser.add_argument("--limit", type=float, default=1200, help="seconds of a command")
    parser.add_argument(
        "--keep", type=Path, help="a new folder for what the commands write and print"
    )
    parser.add_argument(
        "--without", action="append", default=[], choices=NEEDS, help="as if it were not here"
    )
    options = parser.parse_args()
    for name in options.without:
        NEEDS[name] = lambda: False
    wrong: list[str] = []
    ran = left = compared = 0
    for name in options.pages:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            for part in ("bin", "reader"):
                (Path(scratch) / part).mkdir()
            folder = Path(scratch) / "reader"
            if options.keep:
                folder = options.keep.resolve() / Path(name).stem
                folder.mkdir(parents=True)
            bash = Bash(Path(scratch) / "bin", options.limit)
            try:
                told = run_page(ROOT / name, folder, bash, update=options.update)
            finally:
                bash.end()
        for each in told.wrong:
            print(f"  {each}", flush=True)
        ran, left, compared = ran + told.ran, left + told.left, compared + told.compared
        wrong += told.wrong
    print(
        f"{len(options.pages)} pages: {ran} commands run, {left} marked as not run here, "
        f"{compared} blocks compared, {len(wrong)} things wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
