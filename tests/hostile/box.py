"""A folder for a hostile command, the command in a forked child, and what became of both."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Longer than that is a hang: in seconds of the processor, and of the clock. What exceeds the
#: latter alone gets a second chance of ``MOST_WAITING_S``: the machine may have been busy.
MOST_SECONDS = 20
MOST_WAITING_S = 120
#: Address space that a command may add to what it began with. Running into it must end well.
MOST_ADDED_BYTES = 6 * 2**30
#: Memory that a command may really take more than it began with.
MOST_MIB = 1536
_LONGEST_LINE, _MOST_LINES = 4200, 60
#: Commands whose pages say that 1 is a comparison or a run that failed.
_MAY_FAIL = ("lab", "sweep")
GOOD = ("ran", "failed", "refused")


@dataclass(frozen=True)
class Command:
    """A command line, and the path that it may write to (None: nothing)."""

    argv: list[str]
    target: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a command: in one word, and the evidence."""

    word: str
    detail: str
    seconds: float
    mib: float

    @property
    def good(self) -> bool:
        return self.word in GOOD


def fill(box: Path, *templates: Path) -> None:
    """Copy the valid files, and put the odd ones beside them."""
    for template in templates:
        shutil.copytree(template, box, symlinks=True, dirs_exist_ok=True)
    (box / "loop").symlink_to("loop")
    (box / "dangling").symlink_to("nowhere")
    (box / "link").symlink_to("mine")
    os.mkfifo(box / "pipe")
    (box / "locked.txt").write_text("locked\n")
    (box / "locked.txt").chmod(0)


def empty(box: Path) -> None:
    """Remove a box, whatever the command made of it (folders nested too deep for rmtree, too)."""

    def allow(_function: object, path: str, _error: object) -> None:
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            Path(path).chmod(0o700)

    with contextlib.suppress(RecursionError, OSError):
        shutil.rmtree(box, onerror=allow)
    if box.exists():
        os.system(f"rm -rf '{box}'")


Snapshot = dict[str, str]


def snapshot(box: Path) -> Snapshot:
    """Every path below ``box`` but folders', and a digest of what is there."""
    found, folders = {}, [str(box)]
    while folders:  # os.walk calls itself, and a command may have nested thousands
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    found[entry.path] = "link to " + os.readlink(entry.path)  # noqa: PTH115
                elif entry.is_dir():
                    folders.append(entry.path)
                elif entry.is_file():
                    found[entry.path] = hashlib.md5(_content(entry.path)).hexdigest()
                else:
                    found[entry.path] = "special"
    return found


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except PermissionError:
        return b"not readable"


def lost(
    before: Snapshot, after: Snapshot, ours: Snapshot, box: Path, command: Command
) -> list[str]:
    """What the user had and has no more: not there, not as it was, nor moved elsewhere.

    ``ours`` is what earlier commands wrote, as they wrote it: it may be replaced below the target
    of the command.
    """
    target = command.target and os.path.realpath(box / command.target.replace("~/", f"{box}/", 1))
    moved = {digest for path, digest in after.items() if path not in before}

    def replaceable(path: str) -> bool:
        as_written = ours.get(os.path.relpath(path, box)) == before[path]
        return as_written and f"{os.path.realpath(path)}/".startswith(f"{target}/")

    return sorted(
        path
        for path, digest in before.items()
        if after.get(path) != digest and digest not in moved and not replaceable(path)
    )


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or a signal's number (neither: it never began)."""

    code: int | None
    signal: int
    said: str
    seconds: float


def run(calls: list[tuple[Callable[[], object], Path]], wall_s: float) -> tuple[list[Ended], float]:
    """Run functions one after another in one child, each with its box for folder and home.

    Returns how each ended (within ``wall_s``), and the MiB that the child took more than its
    parent. What they started ends with the child.
    """
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _limit_memory()
            for call, box in calls:
                _call(call, box, wall_s)
        finally:
            os._exit(0)
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    ended = []
    for _, box in calls:
        said, code = _said(box), _exit_code(box)
        began = said.is_file()
        text = said.read_text("utf-8", "replace") if began else ""
        number, seconds = code.read_text().split() if code.is_file() else (None, wall_s)
        ended.append(
            Ended(None if number is None else int(number), killed * began, text, float(seconds))
        )
        said.unlink(missing_ok=True)
        code.unlink(missing_ok=True)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return ended, max(0, usage.ru_maxrss - own) / 1024


def _said(box: Path) -> Path:
    return box.with_name(box.name + ".stderr")


def _exit_code(box: Path) -> Path:
    return box.with_name(box.name + ".exit")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_ADDED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**29, 2**29))


def _call(call: Callable[[], object], box: Path, wall_s: float) -> None:
    """One function in the child. Its exit code is written beside the box when it has ended."""
    began, code = time.monotonic(), 1
    os.chdir(box)
    os.environ["HOME"] = str(box)
    said = os.open(_said(box), os.O_WRONLY | os.O_CREAT)
    null = os.open(os.devnull, os.O_RDWR)
    for number, source in ((0, null), (1, null), (2, said)):
        os.dup2(source, number)
    for number in (said, null):
        os.close(number)
    # Their default ends the child, also where it is in C code.
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    with (
        open(1, "w", encoding="utf-8", closefd=False) as sys.stdout,
        open(2, "w", encoding="utf-8", closefd=False) as sys.stderr,
    ):
        try:
            call()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _exit_code(box).write_text(f"{code} {time.monotonic() - began}")


def judge(ended: Ended, command: str) -> tuple[str, str]:
    """The outcome in a word, and why. Exit code 70, an error of ours, is bad."""
    code, said = ended.code, ended.said
    if code is None:
        hung = ended.signal in (signal.SIGALRM, signal.SIGPROF)
        return "hang" if hung else f"signal {ended.signal}", said[-500:]
    if "Traceback (most recent call last)" in said:
        return "traceback", _where(said)
    if code == 0:
        return "ran", ""
    if code == 1 and command in _MAY_FAIL:
        return "failed", ""
    if code != 2:
        return f"exit {code}", said[-500:]
    error = re.search(r"^[Ee]rror: .+\n(\S.*: .+\n|\.\.\. and .+\n)*\Z", said, re.MULTILINE)
    if error is None:
        return "not a line a mistake", said[-1000:]
    lines = error[0].splitlines()
    if len(lines) > _MOST_LINES or max(map(len, lines)) > _LONGEST_LINE:
        return "endless line", error[0][:300]
    return "refused", error[0]


def _where(said: str) -> str:
    """The exception, and the last place in our own code."""
    ours = re.findall(
        r'File "[^"]*/((?:policies|profiler|simulator|experiments)/[^"]*)", line (\d+)', said
    )
    last = next(line for line in reversed(said.splitlines()) if line.strip())
    return f"{last[:200]} at {':'.join(ours[-1]) if ours else '?'}"


def outcomes(
    commands: list[tuple[Command, Path]], ours: Snapshot, wall_s: float = MOST_SECONDS
) -> list[Outcome]:
    """Run command lines in their boxes, and judge what they said, took and left."""
    before = [snapshot(box) for _, box in commands]
    ended, mib = run([(lambda c=c: _main(c), box) for c, box in commands], wall_s)
    found = []
    for (command, box), earlier, end in zip(commands, before, ended, strict=True):
        word, detail = judge(end, command.argv[0])
        gone = lost(earlier, snapshot(box), ours, box, command)
        if gone:
            names = [os.path.relpath(path, box) for path in gone[:5]]
            word, detail = "lost", f"{', '.join(names)}; it had {word}: {detail}"
        elif word in GOOD and mib > MOST_MIB:
            word, detail = "memory", f"{mib:.0f} MiB; it had {word}: {detail}"
        found.append(Outcome(word, detail, end.seconds, mib))
    return found


def _main(command: Command) -> None:
    from sarathi_sim.experiments.cli import app as cli

    for clear in caches():  # the last command's files had the same names
        clear()
    sys.argv = ["sarathi-sim", *command.argv]
    if command.argv[0] == "fit":  # what it says on stdout are the mistakes
        sys.stdout = sys.stderr
    cli.main()


@cache
def caches() -> list[Callable[[], None]]:
    """What empties each cache of our packages."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("sarathi_sim."):
            made_here = [v for v in vars(module).values() if getattr(v, "__module__", "") == name]
            found += [v.cache_clear for v in made_here if hasattr(v, "cache_clear")]
    return found
