"""Measure op times on this machine and write them as profile bundles; a killed run can resume.

Needs torch only when :func:`profile` runs.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..bundle.schema import (
    Bundle,
    bundle_path,
    check_replaceable,
    load_bundle,
    write_bundle,
)
from ..bundle.tables import OVERHEADS
from ..facts.ops import OPS
from ..planning.grid import (
    DESIGNED,
    MIXED,
    Grid,
    Journal,
    Key,
    ProfileError,
    Settings,
    Timing,
    coarse_grid,
    designed_points,
    make_grid,
    settings_hash,
)
from ..shard.rank_processes import RankProcesses
from ..storage.child import Progress, Say
from ..storage.files import read_bounded
from ..storage.manifest import check_files
from ..storage.strict import did_you_mean
from .to_bundle import (
    Facts,
    borrow_collectives,
    collectives_source,
    gpu_facts,
    measured,
    measured_bundle,
    skipped,
    write_device,
)

if TYPE_CHECKING:
    import torch

    from ..shard.attention import Attention
    from ..shard.timing import Sampler
    from .shard_ops import ShardOps


def message_sizes(largest: int) -> list[int]:
    """1 KiB to at least ``largest`` bytes, two sizes an octave; all multiples of 4."""
    sizes = [2**i * half // 2 for i in range(10, 34) for half in (2, 3)]
    return sizes[: next(i for i, size in enumerate(sizes) if size >= largest) + 1]


def time_collectives(
    ranks: int,
    backend: str,
    dtype: str,
    all_reduce: Sequence[int],
    send_recv: Sequence[int],
    repeats: int = 20,
    timeout_s: float = 60.0,
) -> Iterator[tuple[str, int, Timing]]:
    """Yields (op, num_bytes, timing) as they come, from ``ranks`` processes on this node.

    ``all_reduce`` and ``send_recv`` are message sizes in bytes on each rank; a send goes from rank
    0 to rank 1. Raises ProfileError where a rank fails, or where nothing comes for ``timeout_s``;
    no process is left behind either way.
    """

    def arguments(folder: Path) -> list[str]:
        listed = ["--backend", backend, "--dtype", dtype, "--store", str(folder / "store")]
        listed += ["--world", str(ranks), "--repeats", str(repeats), "--timeout", str(timeout_s)]
        listed += ["--all-reduce", *map(str, all_reduce), "--send-recv", *map(str, send_recv)]
        return listed

    with RankProcesses(
        "sarathi_sim.profiler.measuring.ranks", arguments, ranks, backend
    ) as processes:
        while entry := processes.entry("timing the collectives", timeout_s):
            seconds = entry["time_us"] * 1e-6 * repeats
            timing = Timing(entry["time_us"], entry["spread"], entry["samples"], seconds=seconds)
            yield entry["op"], int(entry["num_bytes"]), timing


def read_inter_node(path: Path) -> dict[int, Timing]:
    """Sends by bytes, from the file that :mod:`sarathi_sim.profiler.measuring.ranks` wrote between
    two nodes. Raises ProfileError for a file that is not one."""
    found = {}
    lines = read_bounded(path).decode(errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if entry["op"] == "send_recv":
                size, time_us = int(entry["num_bytes"]), float(entry["time_us"])
                spread = float(entry["spread"])
                if size < 0 or not (0 < time_us < math.inf and 0 <= spread < math.inf):
                    raise ValueError
                found[size] = Timing(time_us, spread, int(entry["samples"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            raise ProfileError(
                f"{path}: row {number} is not a line of "
                f"sarathi_sim.profiler.measuring.ranks: {line[:80]!r}"
            ) from None
    if not found:
        raise ProfileError(f"{path}: holds no send_recv")
    return found


#: Points nearer than this share of the size are not worth a measurement on a CPU, whose times have
#: no exact steps; a GPU's have.
_RESOLUTION = {"cpu": 1 / 64, "cuda": 0.0}


class DegreeSession:
    """One TP degree: the estimate, the coarse and designed points, adaptive ones, collectives."""

    def __init__(
        self,
        settings: Settings,
        tp: int,
        journal: Journal,
        ops: ShardOps,
        say: Say,
        progress: Progress,
        budget_s: float,
        max_s: float = math.inf,
    ) -> None:
        self.settings, self.tp, self.journal, self.ops = settings, tp, journal, ops
        self.say, self.progress = say, progress
        self.coarse = {
            op: coarse_grid(op, settings.limits) for op in _asked(settings, settings.local_ops)
        }
        self.designed = {
            op: designed_points(op, settings.limits) for op in _asked(settings, DESIGNED)
        }
        self.budget_s, self.spent_s = budget_s, 0.0
        self._until = time.perf_counter() + max_s
        self._expected: dict[tuple[str, Key], float] = {}

    def announce(self, free_bytes: float) -> None:
        """Print the expected time and memory, from two probes of each op."""
        for op, keys in (self.coarse | self.designed).items():
            self._expect(op, keys)
        seconds = sum(
            expected
            for (op, key), expected in self._expected.items()
            if self.journal.get(op, key) is None
        )
        needs = self.ops.needs
        coarse, designed = (sum(map(len, p.values())) for p in (self.coarse, self.designed))
        self.say(
            f"tp {self.tp}: {coarse} coarse points and {designed} of mixed or skewed batches take "
            f"about {seconds:.0f} s, adaptive ones up to "
            f"{max(0.0, self.budget_s - seconds):.0f} s more; memory "
            f"{sum(needs.values()) / 1e9:.2f} GB (KV cache {needs['kv_cache'] / 1e9:.2f}) of "
            f"{free_bytes / 1e9:.1f} free; attention: {self.ops.attention.name}"
        )
        finished = len(self.journal)
        if finished:
            self.say(f"tp {self.tp}: resuming, {finished} points are finished already")

    def _expect(self, op: str, keys: list[Key]) -> None:
        """Seconds that each coarse point will take: linear in its work between two probes."""
        ordered = sorted(keys, key=lambda key: _work(op, key))
        small, medium = ordered[0], ordered[len(ordered) // 2]
        low, high = _work(op, small), _work(op, medium)
        at_low, at_high = self._probe(op, small), self._probe(op, medium)
        slope = max(0.0, at_high - at_low) / max(1.0, high - low)
        for key in keys:
            one = at_low + slope * (_work(op, key) - low)
            # Two warm-ups, and half as many samples again for the points that are not steady.
            sample = one + self.ops.timer.flush_s
            self._expected[op, key] = (2 + 1.5 * self.settings.repeats) * sample + 1e-3

    def _probe(self, op: str, key: Key) -> float:
        """Approximate seconds of one call; 0 for a point that fails, which is booked at once."""
        known = self.journal.get(op, key)
        if known is None:
            known = self.ops.probe(op, key)
            if known.time_us is None:
                self._book(op, key, known)
        return (known.time_us or 0.0) * 1e-6

    def measure(self) -> dict[str, Grid]:
        """All coarse and designed points, then adaptive ones until target or budget."""
        total = sum(self._expected.values())
        done = 0.0
        for op, keys in (self.coarse | self.designed).items():
            for key in keys:
                self._point(op, key)
                done += self._expected[op, key]
                self.progress(f"tp {self.tp}: coarse points, s", round(done), max(1, round(total)))
        limits, resolution = self.settings.limits, _RESOLUTION[self.settings.device]
        grids = {}
        for op in self.coarse:
            points = {k: t.time_us or 0.0 for k, t in measured(self.journal, op).items()}
            coarse = {k: v for k, v in points.items() if k in set(self.coarse[op])}
            if not coarse:
                why = next(t.note for t in self.journal.points(op).values())
                raise ProfileError(f"tp {self.tp}: no point of {op} could be measured: {why}")
            grids[op] = make_grid(op, coarse, self.settings.target, limits, resolution)
        self._adapt(grids)
        for line in skipped(self.journal):
            self.say(f"tp {self.tp}: skipped {line}")
        return grids

    def _point(self, op: str, key: Key) -> Timing:
        timing = self.journal.get(op, key)
        if timing is None:
            if time.perf_counter() > self._until:
                raise ProfileError(
                    f"tp {self.tp}: the max_seconds are over, {len(self.journal)} points are "
                    "finished; the same command continues"
                )
            timing = self.ops.measure(op, key)
            self._book(op, key, timing)
        return timing

    def _book(self, op: str, key: Key, timing: Timing) -> None:
        self.journal.add(op, key, timing)
        if timing.lost:
            raise ProfileError(
                f"tp {self.tp}: the GPU does nothing more for this process after {op} {key}: "
                f"{timing.note}; the same command continues with the next point"
            )

    def _adapt(self, grids: dict[str, Grid]) -> None:
        # The time of finished points counts after a restart too, so that it ends as without one.
        beforehand = self.coarse | self.designed
        before = sum(self._point(op, key).seconds for op in beforehand for key in beforehand[op])
        self.spent_s, room = before, max(0.0, self.budget_s - before)
        what = f"tp {self.tp}: adaptive points, s"
        began = time.perf_counter()  # the search takes time, too
        known_s = 0.0
        while self.spent_s < self.budget_s and time.perf_counter() < self._until:
            proposals = {
                op: proposal
                for op, grid in grids.items()
                if not stalled(grid.held_out, grid.noise) and (proposal := grid.propose())
            }
            if not proposals:
                break
            op = max(proposals, key=lambda op: proposals[op].score)
            key = proposals[op].key
            known = self.journal.get(op, key)
            timing = known or self._point(op, key)
            known_s += known.seconds if known else 0.0
            self.spent_s = before + known_s + time.perf_counter() - began
            if timing.time_us is None:
                grids[op].skip(key)
            else:
                grids[op].add(key, timing.time_us, timing.spread)
            self.progress(
                what,
                round(min(self.spent_s - before, room)),
                max(1, round(room)),
            )
        self.progress(
            what,
            max(1, round(room)),
            max(1, round(room)),
        )

    def sustained(self) -> None:
        """Run a layer without a pause for ``sustained_s``: engines run hotter than samples are.

        It is the longest layer measured, if it takes longer than its launch: a shorter one waits
        for the host. The journal keeps its time at the start (0) and over the last quarter (1),
        and that of its launch (2).
        """
        seconds, layers = self.settings.sustained_s, measured(self.journal, MIXED)
        if self.ops.device.type == "cpu" or not seconds or not layers:
            return
        key = max(layers, key=lambda key: layers[key].time_us or 0.0)
        longest, launch = layers[key], self.journal.get("sustained", (2,))
        if time.perf_counter() + seconds >= self._until:
            return
        if launch is None:
            launch = self.ops.launch(key)
            self._book("sustained", (2,), launch)
        if self.journal.get("sustained", (1,)) is not None or launch.time_us is None:
            return
        if launch.time_us >= (longest.time_us or 0.0):
            self.say(
                f"tp {self.tp}: no layer was run for {seconds:.0f} s: the longest takes "
                f"{longest.time_us:.0f} us, and {launch.time_us:.0f} us to launch"
            )
            return
        for when, timing in enumerate(self.ops.sustained(key, seconds)):
            self._book("sustained", (when,), timing)

    def fused(self) -> None:
        """Time ``others`` in fused kernels, too, at every fourth of its coarse points on a GPU. No
        more after one that fails, which takes long (without a C compiler, say), or when the time is
        over."""
        if self.ops.device.type == "cpu":
            return
        for key in self.coarse["others"][::4]:
            timing = self.journal.get("others_fused", key)
            if timing is None:
                if time.perf_counter() > self._until:
                    return
                timing = self.ops.fused_others(key)
                self._book("others_fused", key, timing)
            if timing.time_us is None:
                self.say(f"tp {self.tp}: no others in fused kernels: {timing.note}")
                return

    def overhead(self) -> None:
        """Measure the launch overhead of a layer, and print its effect on a simulation."""
        from ..shard.timing import guarded
        from .shard_ops import advice, overheads

        for what, measure in overheads(self.ops).items():
            key = (OVERHEADS.index(what),)
            if self.journal.get("overhead", key) is None:
                self._book("overhead", key, guarded(measure, self.ops.device))
        times = measured(self.journal, "overhead")
        known = {OVERHEADS[index]: timing.time_us or 0.0 for (index,), timing in times.items()}
        layers = self.settings.model.num_layers
        if text := advice(self.settings.device, layers, known):
            self.say(f"tp {self.tp}: {text}")

    def collectives(self, ranks: int) -> None:
        """All-reduce over the TP degree, and send/recv between two ranks of this node."""
        settings = self.settings
        largest = settings.limits.max_tokens * settings.model.hidden_size * self.ops.size
        missing: dict[str, list[int]] = {}
        for op in ("all_reduce", "send_recv") if self.tp > 1 else ("send_recv",):
            sizes = message_sizes(largest)
            missing[op] = [n for n in sizes if self.journal.get(op, (n,)) is None]
        total = sum(map(len, missing.values()))
        if not total:
            return
        timings = time_collectives(
            ranks,
            "nccl" if settings.device == "cuda" else "gloo",
            settings.dtype,
            missing.get("all_reduce", []),
            missing["send_recv"],
            repeats=10 * settings.repeats,
        )
        for done, (op, num_bytes, timing) in enumerate(timings, start=1):
            self.journal.add(op, (num_bytes,), timing)
            self.progress(f"tp {self.tp}: collectives, sizes", done, total)

    def facts(self, grids: Mapping[str, Grid]) -> Facts:
        """Points and held-out error of each op, printed and kept in the meta."""
        known: Facts = {"repeats": self.settings.repeats, "target_pct": 100 * self.settings.target}
        for op, grid in grids.items():
            errors = sorted(100 * error for error in grid.held_out)
            coarse = len(measured(self.journal, op)) - len(errors)
            known[f"points_{op}"] = coarse + len(errors)
            text = f"tp {self.tp}: {op}: {coarse} + {len(errors)} adaptive points"
            if errors:
                middle, worst = errors[len(errors) // 2], errors[-1]
                known[f"held_out_median_pct_{op}"] = round(middle, 2)
                text += f"; held-out error beyond noise: median {middle:.1f} %, worst {worst:.1f} %"
            self.say(text)
        for op in DESIGNED:
            known[f"points_{op}"] = len(measured(self.journal, op))
        known["skipped_points"] = len(skipped(self.journal))
        eager, fused = (measured(self.journal, op) for op in ("others", "others_fused"))
        shares = [
            100 * (fused[key].time_us or 0.0) / (eager[key].time_us or math.inf)
            for key in fused
            if key in eager
        ]
        if shares:
            known["others_fused_pct"] = round(median(shares), 1)
            self.say(f"tp {self.tp}: others takes {median(shares):.0f} % of it in fused kernels")
        times = measured(self.journal, "sustained")
        if len(times) == 3:
            first, last = times[0,], times[1,]
            slower = 100 * ((last.time_us or 0.0) / (first.time_us or 1.0) - 1)
            known |= {
                "sustained_s": self.settings.sustained_s,
                "sustained_layer_us": round(last.time_us or 0.0, 1),
                "sustained_launch_us": round(times[2,].time_us or 0.0, 1),
                "sustained_slower_pct": round(slower, 2),
                "sustained_sm_clock_mhz": last.clock_mhz,
                "sustained_power_w": last.power_w,
                "sustained_temperature_c": last.temperature_c,
                "sustained_slowed_by": last.throttle or "nothing",
            }
            self.say(
                f"tp {self.tp}: a layer run for {self.settings.sustained_s:.0f} s takes "
                f"{slower:+.1f} %, at {last.clock_mhz:.0f} MHz, {last.power_w:.0f} W, "
                f"{last.temperature_c:.0f} C; slowed by {last.throttle or 'nothing'}"
            )
        return known


def _asked(settings: Settings, ops: Iterable[str]) -> list[str]:
    return [op for op in ops if not settings.ops or op in settings.ops]


def stalled(errors: Sequence[float], noise: Sequence[float], window: int = 16) -> bool:
    """Whether more points would show noise alone: the held-out errors of the last ``window`` points
    are no smaller than before, and no larger than the points' own ``noise``, which was taken off
    them already. Medians are compared. Larger errors are a shape, which more points show.
    """
    if len(errors) < 2 * window:
        return False
    last = median(errors[-window:])
    before = median(errors[-2 * window : -window])
    return 0.9 * before <= last <= median(noise[-window:])


def _work(op: str, key: Sequence[int]) -> float:
    """A size that an op's time is roughly proportional to."""
    if op == "attn_decode_skew":
        return float(key[0] * (key[2] + 1))
    if op == "mixed":  # the linear ops weigh most
        return float(key[0] + key[2])
    family = OPS[op].family
    if family == "prefill":
        return float(key[0] * (key[0] + key[1]))
    return float(key[0] * (key[1] + 1) if family == "decode" else key[0])


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
                    self.say(f"tp {tp}: {len(journal)} points are kept; continue without ops")
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
        raise ProfileError("weights fp8: experts are measured in --dtype only")
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
