"""Measure op times on this machine and write them as profile bundles; a killed run can resume.

Needs torch only when :func:`profile` runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle.schema import (
    Bundle,
    bundle_path,
    check_replaceable,
    load_bundle,
    write_bundle,
)
from ..planning.grid import DESIGNED, Grid, Journal, ProfileError, Settings, settings_hash
from ..storage.child import Progress, Say
from ..storage.manifest import check_files
from ..storage.strict import did_you_mean
from .degree import DegreeSession, read_inter_node
from .to_bundle import (
    Facts,
    borrow_collectives,
    collectives_source,
    gpu_facts,
    measured_bundle,
    skipped,
    write_device,
)

if TYPE_CHECKING:
    import torch

    from ..shard.attention import Attention
    from ..shard.timing import Sampler
    from .shard_ops import ShardOps


def profile(settings: Settings, say: Say, progress: Progress) -> list[Path]:
    """Profile every TP degree; returns the bundle folders and the device file, as written. ``say``
    gets lines for the user, ``progress`` the step, seconds done and seconds in all. Raises
    ProfileError for a device, dtype or degree that cannot be measured here."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ProfileError(
            "profiling needs torch, which is not installed: pip install 'sarathi-sim[profiler]'"
        ) from None
    try:
        settings.model.check_plain("the profiler", mixtures=True)
    except ValueError as error:
        raise ProfileError(str(error)) from None
    run = _ProfileRun(settings, say, progress)
    tps = missing_degrees(settings, run.name, run.identities, say)
    written, left_s = [], settings.budget_s
    with run.sampler:
        for done, tp in enumerate(tps):
            path, spent_s = run.degree(tp, max(0.0, left_s) / (len(tps) - done))
            left_s -= spent_s
            if path is not None:
                written.append(path)
            run.machine.release()  # its memory is the next degree's
        return written if settings.ops else [*written, run.device_file()]


class _ProfileRun:
    """The opened device, and the state that all its TP degrees share."""

    def __init__(self, settings: Settings, say: Say, progress: Progress) -> None:
        from ..shard import environment as machine
        from ..shard.timing import Sampler, Timer, reason

        self.until = time.perf_counter() + settings.max_s

        self.settings, self.say, self.progress, self.machine = settings, say, progress, machine
        self.device, self.dtype = machine.open_device(
            settings.device, settings.dtype, settings.threads, settings.weights
        )
        self.per_node = machine.devices_on_node(settings.device, settings.threads)
        _check(settings, self.per_node)
        self.attentions = {
            tp: _attention(settings, tp, self.device, self.dtype) for tp in settings.tps
        }
        self.inter_node = read_inter_node(settings.inter_node) if settings.inter_node else {}
        self.name = settings.device_name or machine.default_device_name(settings.device)
        self.known: Facts = machine.facts(settings.device, settings.threads)
        on_gpu = settings.device == "cuda"
        self.sampler: Sampler | AbstractContextManager[None] = nullcontext()
        sampler = None
        if on_gpu:
            self.sampler = sampler = Sampler()
            self.known |= sampler.facts
        try:
            self.timer = Timer(self.device, settings.repeats, flush=settings.flush, sampler=sampler)
        except RuntimeError as error:  # another process has its memory, say
            raise ProfileError(f"device {settings.device}: {reason(error)}") from None
        self.identities = {
            tp: _identity(settings, tp, self.known, attention.name)
            for tp, (attention, _) in self.attentions.items()
        }

    def degree(self, tp: int, budget_s: float) -> tuple[Path | None, float]:
        """Measure one TP degree and write its bundle; its folder, and the seconds it took. None
        where only some ops were asked for: their points stay in the journal."""
        from ..shard.timing import no_garbage_collection

        settings = self.settings
        self._say_attention(tp)
        path = bundle_path(settings.out, self.name, settings.model.name, tp)
        with closing(Journal(path.with_name(f".{path.name}.work"), self.identities[tp])) as journal:
            free_bytes = 0.9 * self.machine.memory_bytes(settings.device)[1]
            ops = self._ops(tp, free_bytes)
            left_s = self.until - time.perf_counter()
            run = DegreeSession(
                settings, tp, journal, ops, self.say, self.progress, budget_s, left_s
            )
            with no_garbage_collection():
                run.announce(free_bytes)
                grids = run.measure()
                if settings.ops:
                    self.say(f"tp {tp}: {len(journal)} points are kept; without ops it goes on")
                    return None, run.spent_s
                run.overhead()
                run.sustained()
                run.fused()  # last: compilation may take long
            _measure_collectives(run, self.per_node)
            write_bundle(self._bundle(run, grids), path, force=settings.force)
            journal.remove()
        return path, run.spent_s

    def _say_attention(self, tp: int) -> None:
        settings, no_xformers = self.settings, self.attentions[tp][1]
        if settings.device == "cuda" and settings.attention == "auto" and no_xformers:
            self.say(f"tp {tp}: {no_xformers}; torch SDPA is timed instead")

    def _ops(self, tp: int, free_bytes: float) -> ShardOps:
        from ..shard.timing import reason
        from .shard_ops import ShardOps

        model, limits, attention = self.settings.model, self.settings.limits, self.attentions[tp][0]
        try:
            return ShardOps(
                model, tp, self.device, self.dtype, limits, self.timer, free_bytes, attention,
                fp8=self.settings.weights == "fp8", distribution=self.settings.expert_distribution,
            )  # fmt: skip
        except ValueError as error:
            raise ProfileError(str(error)) from None
        except RuntimeError as error:  # the device's memory, as another process has some of it
            raise ProfileError(f"tp {tp}: the shard cannot be made: {reason(error)}") from None

    def _bundle(self, run: DegreeSession, grids: Mapping[str, Grid]) -> Bundle:
        """The measured bundle, with collectives of another one if the settings say so."""
        settings, tp, journal = self.settings, run.tp, run.journal
        attention, no_xformers = self.attentions[tp]
        more: Facts = {"attention": attention.name, "attention_fallback": no_xformers}
        if settings.model.experts:
            more["expert_distribution"] = settings.expert_distribution
        if settings.weights == "fp8":
            more["weights"] = "fp8"
        more["settings"] = asked_for(settings, self.identities[tp])
        more |= gpu_facts(journal) | run.facts(grids)
        if settings.device == "cuda":
            floor = self.timer.event_floor()
            more |= {"flush": settings.flush, "event_floor_us": round(floor.time_us or 0.0, 3)}
        bundle = measured_bundle(
            journal, settings.model, tp, self.name, settings.dtype, self.known | more,
            _notes(journal), self.inter_node, attention.name,
        )  # fmt: skip
        if settings.collectives:
            bundle = borrow_collectives(bundle, collectives_source(settings.collectives, tp))
        return bundle

    def device_file(self) -> Path:
        """Write the device file for simulations."""
        settings, machine = self.settings, self.machine
        total, free = machine.memory_bytes(settings.device)
        return write_device(
            settings.out,
            self.name,
            total // (self.per_node if settings.device == "cpu" else 1),
            machine.copy_bandwidth(self.device, self.timer, free),
            machine.num_sms(settings.device, settings.threads),
            self.per_node,
            str(self.known.get("gpu", self.known["processor"])),
        )


def _measure_collectives(run: DegreeSession, per_node: int) -> None:
    """All-reduce and send/recv, unless they come from another bundle or the GPUs are too few."""
    settings, ranks = run.settings, max(2, run.tp)
    if settings.collectives is not None:
        return
    if settings.device == "cpu" or ranks <= per_node:
        run.collectives(ranks)
    else:
        run.say(f"tp {run.tp}: one GPU only, so no send/recv was timed and pp must be 1")


def missing_degrees(
    settings: Settings, name: str, identities: Mapping[int, Mapping[str, object]], say: Say
) -> list[int]:
    """The TP degrees to measure: all but those whose bundles the same command wrote already. Raises
    UserError, before anything is measured, where a file that is to be written exists and is not
    ours, or was measured otherwise and ``settings`` do not say ``force``."""
    missing = []
    check_files(settings.out, f"{name}.yaml")
    for tp, identity in identities.items():
        path = bundle_path(settings.out, name, settings.model.name, tp)
        check_replaceable(path, force=True)
        if settings.force or not _was_measured(path, asked_for(settings, identity)):
            check_replaceable(path, force=settings.force)
            missing.append(tp)
        else:
            say(f"tp {tp}: measured already; --force measures it again")
    return missing


def _was_measured(path: Path, asked: str) -> bool:
    if not (path / "meta.yaml").is_file():
        return False
    return load_bundle(path).meta.environment.get("settings") == asked


def asked_for(settings: Settings, identity: Mapping[str, object]) -> str:
    """A hash of the inputs of a bundle: the code of its points, and the points."""
    grid = {
        "limits": asdict(settings.limits),
        "budget_s": settings.budget_s,
        "target": settings.target,
        "inter_node": str(settings.inter_node),
        "collectives": str(settings.collectives),
    }
    return settings_hash({**identity, **grid})


def _check(settings: Settings, per_node: int) -> None:
    name = settings.device_name
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ProfileError(
            f"--set device_name={name!r}: must hold only letters, digits, _ . and -: "
            "it names a folder"
        )
    for op in settings.ops:
        known = (*settings.local_ops, *DESIGNED)
        if op not in known:
            raise ProfileError(
                f"--set ops={op}: unknown{did_you_mean(op, known)}; allowed: {', '.join(known)}"
            )
    if settings.weights == "fp8" and settings.model.experts:
        raise ProfileError("weights fp8: a mixture's experts are measured in --dtype only")
    for tp in settings.tps:
        try:
            settings.model.check_tp(tp)
        except ValueError as error:
            raise ProfileError(str(error)) from None
        if settings.collectives:
            collectives_source(settings.collectives, tp)  # now, not after an hour of measuring
        if settings.device == "cuda" and tp > max(1, per_node) and not settings.collectives:
            raise ProfileError(
                f"--tp {tp}: the all-reduce needs {tp} GPUs on this node, which has {per_node}; "
                f"--set collectives=DIR takes it from a bundle of tp {tp}"
            )


def _attention(
    settings: Settings, tp: int, device: torch.device, dtype: torch.dtype
) -> tuple[Attention, str]:
    """The attention backend, and why it is not xformers; chosen before the first measurement."""
    from ..shard.attention import choose_attention

    model = settings.model
    try:
        return choose_attention(
            device, dtype, *model.heads_per_rank(tp), model.head_dim, settings.attention
        )
    except ValueError as error:
        raise ProfileError(f"tp {tp}: {error}") from None


#: Of the environment's facts: the hardware and the libraries that compute. Another machine with
#: the same ones, whatever its driver, kernel or host CPU, goes on where this one was stopped.
_IDENTITY = {
    "cpu": ("processor", "threads", "cpu_capability", "torch"),
    "cuda": ("gpu", "cuda", "torch"),
}


def _identity(settings: Settings, tp: int, known: Facts, attention: str) -> dict[str, object]:
    """Everything that a point's time depends on; the grid's limits and the budget are not."""
    return {
        "model": asdict(settings.model),
        "tp": tp,
        "device": settings.device,
        "dtype": settings.dtype,
        "repeats": settings.repeats,
        "weights": settings.weights,
        "flush": settings.flush if settings.device == "cuda" else "",
        "attention": attention,
        "environment": {key: known[key] for key in _IDENTITY[settings.device]},
    } | ({"experts": settings.expert_distribution} if settings.model.experts else {})


def _notes(journal: Journal) -> str:
    lines = skipped(journal)
    text = "measured on one shard with random weights; send_recv inter_node only where given"
    return f"{text}; {len(lines)} points without a time: {'; '.join(lines[:8])}" if lines else text
