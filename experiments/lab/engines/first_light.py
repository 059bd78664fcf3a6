"""The first hour on a GPU: ``sarathi-sim lab first-light``.

Each step is a process with a limit of time: a probe of the machine, profiles, our times beside
published kernels, the engine beside the simulator. A ledger lists every try, one archive holds
everything. Finished steps stay finished, on another machine with the same GPU, too. No torch here.

``python -m sarathi_sim.experiments.lab.engines.first_light PARENT WORD...`` is a step's process.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from sarathi_sim.profiler.bundle import schema
from sarathi_sim.profiler.bundle.tables import TABLES
from sarathi_sim.profiler.facts.device import load_device, shipped_device
from sarathi_sim.profiler.facts.formats import Kernels, Stack
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.kernels.stack_file import stacks_on
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.shard_times import asked_at
from sarathi_sim.profiler.planning.grid import ProfileError
from sarathi_sim.profiler.storage.child import Say, end_with, how_it_ended, start_child
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.profiler.storage.folder_lock import FolderBusyError, FolderLock
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import UserError, parse, strict_dataclass

Facts = dict[str, Any]
"""What the probe finds out of a machine."""
MODULE = "sarathi_sim.experiments.lab.engines.first_light"


@dataclass(frozen=True)
class HourStep:
    """A step, as ``data/lab/first_light.yaml`` describes it."""

    name: str
    limit_s: float
    least_s: float = 60
    options: Mapping[str, Any] = field(default_factory=dict)


PROBE = "probe"
_HOUR: dict[str, Any] = read_mapping(data_dir() / "lab" / "first_light.yaml")
STEPS = tuple(HourStep(**step) for step in _HOUR["steps"])
_SMALL = _HOUR["rehearsal"]

#: Of a profile's limit, until points that refine are no longer added; of what is left of it, until
#: nothing more is measured. The rest is for the start and for writing.
_FOR_POINTS, _AT_MOST = 0.5, 0.8
#: The seconds of ``validate`` for its start and its report.
_FOR_REPORT_S = 75.0
#: Those of ``profile``; its rarer ones are ``--set``.
_OPTIONS = {"model", "tp", "device", "dtype", "attention", "weights", "budget", "out"}
#: Whose kernels a rehearsal takes without a GPU.
_STAND_IN = "h100-80g-sxm"


def words_of(step: HourStep, out: Path, seconds: float, rehearsal: bool) -> list[str]:
    """The words of a step's process in the folder ``out``, with ``seconds`` left for it. Raises
    ProfileError before a probe, and where published collectives are needed and do not ship."""
    if step.name in OWN_STEPS:
        return [step.name, str(out), str(int(rehearsal))]
    facts = probed(out)
    on_gpu, tp = facts["device"] == "cuda", int(step.options.get("tp", 1))
    if step.name == "validate":
        # In bf16 as the profiles, which predict its runs, too; without repeats that end too late.
        limit_s = max(1.0, seconds - _FOR_REPORT_S)
        settings = ["repeats=3", "dtype=bfloat16", f"limit_s={limit_s:.0f}"]
        settings = [f"validation.{setting}" for setting in settings]
        if rehearsal:
            settings = [f"device={facts['device']}", *_SMALL["validation"]]
        words = ["lab", "validate", "validate_gpu", *(f"--set={s}" for s in settings)]
        return [*words, f"--out={out / 'validation'}", f"--profiles={out / 'profiles'}"]
    special = [word for word in ("sdpa", "cudnn", "fp8") if word in step.options.values()]
    options: dict[str, object] = {"attention": "xformers", **step.options}
    options |= {} if on_gpu else {"attention": "sdpa", "weights": "dtype"}
    options |= {
        "device": facts["device"],
        "dtype": "bf16" if on_gpu else "fp32",
        "device_name": "-".join([facts["device_name"], *special]),
        "out": out / "profiles",
        "budget": _FOR_POINTS * step.limit_s,
        "max_seconds": max(1.0, _AT_MOST * seconds),
        **(_SMALL["profile"] if rehearsal else {}),
    }
    if tp > 1:
        options["collectives"] = published_collectives(out, str(options["model"]), tp)
    return ["profile", *(f"--{'' if n in _OPTIONS else 'set='}{n}={v}" for n, v in options.items())]


def probed(out: Path) -> Facts:
    """What the probe has found out. Raises ProfileError where it has not yet."""
    try:
        facts: Facts = json.loads((out / "results" / "probe.json").read_bytes())
    except (OSError, ValueError):
        raise ProfileError("the probe has not ended well") from None
    return facts


def published(out: Path) -> tuple[str, list[Stack]]:
    """The shipped device that this GPU is, and the stacks whose kernels on it ship, vLLM's first.
    Raises ProfileError where none do."""
    facts = probed(out)
    sheet = load_device(_STAND_IN) if facts["device"] == "cpu" else shipped_device("", facts["gpu"])
    stacks = stacks_on(sheet.name) if sheet is not None else []
    if sheet is None or not stacks:
        raise ProfileError("no kernels of this GPU ship, so there is nothing published to take")
    return sheet.name, sorted(stacks, key=lambda stack: stack != "vllm")


def published_collectives(out: Path, model: str, tp: int) -> Path:
    """A bundle of the first stack's times on this GPU, collectives among them, at the sizes of a
    shipped bundle. Raises ProfileError where none ship."""
    device, stacks = published(out)
    spec = load_model(model)
    sizes = schema.load_bundle(schema.bundle_path(data_dir() / "profiles", "h200", "llama-3-8b", 2))
    path = out / "published" / spec.name / f"tp{tp}"
    times = StackTimes(device, Kernels(stacks[0]), spec, tp)
    schema.write_bundle(asked_at(times, sizes), path, force=True)
    return path


def probe(out: Path, rehearsal: bool) -> str:
    """Versions, memory and clocks, in ``results/probe.json``; in a few words. A rehearsal takes the
    CPU where there is no GPU. Raises ProfileError for that otherwise, and for another GPU than the
    hour began on."""
    from sarathi_sim.profiler.shard import environment
    from sarathi_sim.profiler.shard.timing import Sampler

    kind = "cuda"
    try:
        environment.open_device(kind, "bfloat16", 1)
    except ProfileError:
        if not rehearsal:
            raise
        kind = "cpu"
    facts: Facts = environment.facts(kind, 1) | Sampler().facts
    facts |= {"device": kind, "device_name": environment.default_device_name(kind)}
    facts["gpu"] = facts.get("gpu", facts["processor"])
    facts["memory_bytes"], facts["free_bytes"] = environment.memory_bytes(kind)
    path = out / "results" / "probe.json"
    if path.exists() and (before := probed(out)["gpu"]) != facts["gpu"]:
        raise ProfileError(f"this is {facts['gpu']}, and the hour began on {before}")
    write_whole(path, json.dumps(facts, indent=1, default=str) + "\n")
    nvml = "" if "driver" in facts else "; no NVML"
    return f"{facts['gpu']}, torch {facts['torch']}, xformers {facts['xformers']}{nvml}"


def tables(out: Path, _: bool) -> str:
    """Every bundle of the folder beside the shipped kernels of its GPU: ``results/tables.json``.
    Raises ProfileError where there is nothing to compare."""
    gpu, stacks = published(out)
    found: dict[str, dict[str, float]] = {}
    profiles = out / "profiles"
    for device, model, tp in schema.list_bundles(profiles) if profiles.is_dir() else []:
        ours = schema.load_bundle(schema.bundle_path(profiles, device, model, tp))
        for stack in stacks:
            theirs = asked_at(StackTimes(gpu, Kernels(stack), ours.meta.model_spec, tp), ours)
            found[f"{device}/{model}/tp{tp} over {stack}, %"] = longer_by(ours, theirs)
    if not found:
        raise ProfileError("no bundle was measured, so there is nothing to compare")
    write_whole(out / "results" / "tables.json", json.dumps(found, indent=1) + "\n")
    return f"{len(found)} comparisons in results/tables.json"


def longer_by(ours: schema.Bundle, theirs: schema.Bundle) -> dict[str, float]:
    """How many percent ``ours`` take longer, by op: the median over the sizes of both."""
    found: dict[str, float] = {}
    for name, table in TABLES.items():
        left, right = ours.tables()[name], theirs.tables()[name]
        if len(left) and len(right):
            both = left.merge(right, on=list(table.key), suffixes=("", "_theirs"))
            percent = 100 * (both["time_us"] / both["time_us_theirs"] - 1)
            ops = both[next(iter(table.labels))] if table.labels else pd.Series(name, both.index)
            found |= {str(op): round(x, 1) for op, x in percent.groupby(ops).median().items()}
    return found


OWN_STEPS = {PROBE: probe, "tables": tables}


def main() -> int:
    """Do a step of ours, or run ``sarathi-sim`` with these words; the exit code. The last line that
    it prints says what became of it."""
    parent, *words = sys.argv[1:]
    end_with(int(parent))
    if words[0] not in OWN_STEPS:
        sys.argv = ["sarathi-sim", *words]
        runpy.run_module("sarathi_sim", run_name="__main__")
        return 0
    try:
        print(OWN_STEPS[words[0]](Path(words[1]), words[2] == "1"))  # noqa: T201
    except UserError as error:
        print(f"error: {error}")  # noqa: T201
        return 2
    return 0


LEDGER = "ledger.json"
DONE, FAILED, LATE, INTERRUPTED = "done", "failed", "over its limit", "interrupted"
#: Locks, and scratch files of writers that were killed (``write_whole``, ``write_bundle``).
_SCRATCH = re.compile(r"(^|/)(lock$|\.[^/]*\.partial$|\.tp\d+-[0-9a-f]{8}/)")


@strict_dataclass
class Entry:
    """One try of a step; ``why`` is the last line that its process printed, or a reason."""

    step: str
    state: str
    seconds: float
    started: str
    why: str


@strict_dataclass
class Ledger:
    """The tries of an hour, in order; ``run`` tells hours apart."""

    format: Literal["sarathi-sim first light 2"]
    rehearsal: bool
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    entries: list[Entry] = field(default_factory=list)

    def last(self, step: str) -> Entry | None:
        """The latest try of a step."""
        return next((e for e in reversed(self.entries) if e.step == step), None)

    def is_done(self, step: str) -> bool:
        """Whether the latest try of a step succeeded."""
        return getattr(self.last(step), "state", None) == DONE

    def write(self, folder: Path) -> None:
        """Replace the file in a folder. Raises OSError."""
        write_whole(folder / LEDGER, json.dumps(asdict(self), indent=1) + "\n")


def read_ledger(place: Path) -> Ledger:
    """The ledger in a folder or an archive. Raises ProfileError where there is none of ours."""
    try:
        folder = place if place.is_dir() else zipfile.Path(place)
        return parse(Ledger, json.loads((folder / LEDGER).read_bytes()), place)
    except (OSError, ValueError, LookupError, zipfile.BadZipFile):
        raise ProfileError(
            f"{place}: exists and is not of first-light, or is damaged: name another"
        ) from None


def pack(folder: Path, archive: Path) -> None:
    """Write all files of ``folder`` to the file ``archive``. Raises OSError."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not _SCRATCH.search(name):
                packed.write(path, name)
    write_whole(archive, stream.getvalue())


def unpack(archive: Path, folder: Path) -> None:
    """Make ``folder``, which is empty or missing, from an archive, whole or not at all. Raises
    ProfileError for a file that is no archive of first-light, and a damaged one; OSError."""
    read_ledger(archive)
    scratch = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(scratch)
        scratch.replace(folder)
    except (zipfile.BadZipFile, zlib.error):
        raise ProfileError(f"{archive}: is damaged") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


#: With less time than this a profile that failed is not tried again.
_AGAIN_S = 15.0


class Hour:
    """A first hour: results, logs, bundles and the ledger are in the folder ``out``, and after
    every step in the file ``archive`` beside it. ``say`` gets lines for the user. A missing ``out``
    is made from the archive to resume, or from ``archive`` where that exists. A ``rehearsal``
    measures a tiny model, on the CPU where there is no GPU."""

    def __init__(self, out: Path, say: Say, rehearsal: bool = False) -> None:
        self.out, self.say, self.rehearsal = out, say, rehearsal
        self.archive = out.with_name(f"{out.name}.zip")
        self.ledger = Ledger("sarathi-sim first light 2", rehearsal)

    def run(
        self, minutes: float = inf, resume: Path | None = None, steps: Sequence[HourStep] = STEPS
    ) -> bool:
        """Run every step that is not done, and the probe; whether all are done then. None begins
        that could end after ``minutes``.

        Raises ProfileError for a folder or archive that is not ours, or that another process uses.
        """
        until = time.monotonic() + 60 * minutes
        if resume and not resume.exists():
            raise ProfileError(f"--resume {resume}: no such file")
        source = resume or self.archive
        if self.out.exists() and {path.name for path in self.out.iterdir()} - {"lock"}:
            read_ledger(self.out)  # nothing is written into another's folder
            if resume:
                self.say(f"{self.out} is there already: going on from it, not from {resume}")
        elif source.exists():
            unpack(source, self.out)
            self.say(f"{self.out}: made from {source}")
        try:
            lock = FolderLock(self.out)
        except FolderBusyError as holder:
            raise ProfileError(f"{self.out}: {holder} works in it: wait or stop it") from None
        try:
            self._open_ledger()
            self._run(until, steps)
            self._summarise(steps)
            pack(self.out, self.archive)
        finally:
            lock.release()
        self.say(f"everything so far: {self.archive}")
        return all(self.ledger.is_done(step.name) for step in steps)

    def _open_ledger(self) -> None:
        if (self.out / LEDGER).exists():
            self.ledger = read_ledger(self.out)
        if self.ledger.rehearsal != self.rehearsal:
            kind, option = ("no", "without") if self.rehearsal else ("a", "with")
            raise ProfileError(
                f"{self.out}: is {kind} rehearsal: go on {option} --dry-run, or name another --out"
            )
        if self.archive.exists() and read_ledger(self.archive).run != self.ledger.run:
            raise ProfileError(
                f"{self.archive}: exists and is not of {self.out}: continue from it with --resume "
                "and another --out"
            )
        self.ledger.write(self.out)
        for name in ("logs", "results"):
            (self.out / name).mkdir(exist_ok=True)

    def _run(self, until: float, steps: Sequence[HourStep]) -> None:
        for step in steps:
            if step.name != PROBE and self.ledger.is_done(step.name):
                self.say(f"{step.name}: done before")
                continue
            left_s = until - time.monotonic()
            if left_s < step.least_s:
                self.say(
                    f"{step.name}: not begun: it takes {step.least_s:.0f} s or more, and "
                    f"{max(0.0, left_s):.0f} s are left; the same command continues"
                )
                return
            left_s = min(step.limit_s, left_s)
            entry = self._attempt(step, left_s)
            left_s -= entry.seconds
            # A GPU may do nothing more for one process, and work for the next.
            if step.options and entry.state == FAILED and left_s > _AGAIN_S:
                entry = self._attempt(step, left_s)
            if step.name == PROBE and entry.state != DONE:
                self.say("without a good probe the next steps are of no use")
                return

    def _attempt(self, step: HourStep, seconds: float) -> Entry:
        self.say(f"{step.name}: up to {seconds:.0f} s")
        started, began = time.strftime("%F %T%z"), time.monotonic()
        state, why = INTERRUPTED, "by a signal"
        try:
            words = words_of(step, self.out, seconds, self.rehearsal)
            state, why = self._run_process(step.name, words, seconds)
        except UserError as error:
            state, why = FAILED, str(error)
        finally:
            entry = Entry(
                step.name,
                state,
                round(time.monotonic() - began, 1),
                started,
                why,
            )
            self.ledger.entries.append(entry)
            self.ledger.write(self.out)
            pack(self.out, self.archive)
            self.say(f"{step.name}: {entry.state} in {entry.seconds:.0f} s. {why}")
        return entry

    def _run_process(self, name: str, words: list[str], seconds: float) -> tuple[str, str]:
        """State and reason of a process, which is ended with all of its group."""
        path = self.out / "logs" / f"{name}.log"
        with path.open("ab") as log:
            process, channel = start_child(
                *(MODULE, *words), stdout=log, stderr=log, start_new_session=True,
                environment={"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return LATE, f"ended after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # also processes that it left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            channel.close()
        if code < 0:
            return FAILED, how_it_ended(code)
        last = path.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return FAILED if code else DONE, last

    def _summarise(self, steps: Sequence[HourStep]) -> None:
        """The last try of each step: ``summary.txt``."""
        done = sum(self.ledger.is_done(step.name) for step in steps)
        lines = [f"{done} of {len(steps)} steps are done"]
        for step in steps:
            entry = self.ledger.last(step.name)
            text = f"{entry.state}, {entry.seconds:.0f} s: {entry.why}" if entry else "not begun"
            lines.append(f"{step.name:15}  {text}"[:150])
        write_whole(self.out / "summary.txt", "".join(f"{line}\n" for line in lines))
        for line in lines:
            self.say(line)


if __name__ == "__main__":
    sys.exit(main())
