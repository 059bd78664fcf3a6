"""The accuracy of the regressions on public measurements, beside the aims.

All scores are on rows that were not fitted. The rules that choose the fitted points see only these
points. The families were chosen on the same files (docs/lab/regressions.md), so the scores are
somewhat optimistic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import STACKS
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS, GemmShape
from sarathi_sim.profiler.kernels.stack_file import StackSpec, load_stack
from sarathi_sim.profiler.physics.fit import Bools, Rows, median_p95_worst
from sarathi_sim.profiler.physics.forms import GEMM
from sarathi_sim.profiler.planning.grid import TILE, Key, Limits, SizeGrid, coarse_grid
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.simulator.confidence.bands import scored
from sarathi_sim.simulator.confidence.held_out import OpTable, far_gemm, linear_fit, surface_fit
from sarathi_sim.simulator.loop.records import Floats, Ints
from sarathi_sim.simulator.op_times.regression import coordinates, decode_surface, prefill_surface
from ..sources import llmservingsim as data
from ..sources import vidur
from .devices import held_out, on
from .kernels import fitted_devices

Aim = tuple[float, float]
"""The aims: largest median and 95th percentile of the errors, in percent."""
BAND = (85, 95)
"""The aim of a 90 % band: least and largest coverage, in whole percent."""


@dataclass(frozen=True)
class Score:
    """Absolute errors in percent on rows not fitted, and the aim where there is one. ``covered`` is
    the share of these rows inside the 90 % band, in percent; None without a band. ``group`` is the
    class that the score counts in. ``causes`` are the reasons of missed aims."""

    what: str
    source: str
    fitted: str
    rows: int
    median: float
    p95: float
    aim: Aim | None
    covered: float | None = None
    group: str = ""
    causes: tuple[str, ...] = ()

    @property
    def met(self) -> bool | None:
        """Whether both aims are met; None without any."""
        return None if self.aim is None else not {"median", "p95"} & {*self.missed}

    @property
    def missed(self) -> list[str]:
        """Which aims are missed: ``median``, ``p95``, ``band``."""
        most = self.aim or (np.inf, np.inf)
        far = {"median": self.median > most[0], "p95": self.p95 > most[1]}
        far["band"] = self.covered is not None and not inside_aim(self.covered)
        return [name for name, missed in far.items() if missed]

    def content(self) -> dict[str, Any]:
        """As ``lab accuracy --json`` prints it."""
        return {**asdict(self), "met": self.met, "missed": self.missed}

    def because(self, errors: str, band: str) -> Score:
        """The score with the causes of missed aims: of its errors, and of its band."""
        causes = dict.fromkeys(band if miss == "band" else errors for miss in self.missed)
        return replace(self, causes=tuple(causes))


def inside_aim(covered: float) -> bool:
    """Whether the coverage of a band is within :data:`BAND`."""
    return BAND[0] <= round(covered) <= BAND[1]


@dataclass(frozen=True)
class ScoreClass:
    """The scores of one class: how many meet the aim, the medians of their errors in percent, the
    share inside the band over all rows and its range over single scores."""

    group: str
    scores: int
    aim: Aim | None
    met: int | None
    median: float
    p95: float
    covered: float | None
    covered_range: tuple[float, float] | None
    causes: list[str]


def by_class(scores: Sequence[Score]) -> list[ScoreClass]:
    """A row a class, in the scores' order."""
    classes = []
    for group in dict.fromkeys(score.group for score in scores):
        of = [score for score in scores if score.group == group]
        bands = [(score.covered, score.rows) for score in of if score.covered is not None]
        share, count = zip(*bands, strict=True) if bands else ((), ())
        median, p95 = np.median([(score.median, score.p95) for score in of], axis=0).tolist()
        met = sum(score.met is True for score in of) if of[0].aim else None
        covered = round(float(np.average(share, weights=count)), 1) if bands else None
        ends = (min(share), max(share)) if bands else None
        causes = [*dict.fromkeys(cause for score in of for cause in score.causes)]
        errors = (round(median, 2), round(p95, 2))
        classes.append(
            ScoreClass(
                group,
                len(of),
                of[0].aim,
                met,
                *errors,
                covered,
                ends,
                causes,
            )
        )
    return classes


#: Hold-outs, aims and causes: ``bundles`` by what is scored, ``kernels`` by family and kind.
AIMS: dict[str, Any] = read_mapping(Path(__file__).with_name("aims.yaml"))


def _score(
    what: str,
    source: str,
    fitted: str,
    parts: Sequence[tuple[Floats, Bools | None]],
) -> Score:
    """Of log errors, with whether the band covers each (None: there is no band)."""
    errors = np.concatenate([off for off, _ in parts])
    inside = [band for _, band in parts if band is not None]
    median, p95 = (round(error, 2) for error in median_p95_worst(errors)[:2])
    covered = round(100 * float(np.concatenate(inside).mean()), 1) if inside else None
    about = AIMS["bundles"][what]
    aim: Any = tuple(about["aim"]) if source.startswith(about.get("of", "")) else None
    score = Score(
        what,
        source,
        fitted,
        len(errors),
        median,
        p95,
        aim,
        covered,
        group=what,
    )
    return score.because(about.get("errors", ""), about.get("band", ""))


def _fitted_to(table: OpTable, fitted: Ints) -> tuple[Floats, Bools, Rows]:
    """Log errors of the other rows, whether the band covers them, and these rows."""
    others = np.setdiff1d(np.arange(len(table.points)), fitted)
    return scored(table, [(fitted, others)], table.far)


def adaptive_grid(size: Floats, time: Floats, points: int) -> Ints:
    """Up to ``points`` rows that the profiler would measure, given the times of all sizes."""
    largest = int(size[-1])
    row: dict[Key, int] = {(int(m),): number for number, m in enumerate(size)}
    limits = Limits(max_tokens=largest, max_context=largest, max_batch=1)
    chosen = [key for key in coarse_grid(LAYER_GEMMS[0], limits) if key in row]
    grid = SizeGrid({key: float(time[row[key]]) for key in chosen}, target=0.01)
    while len(chosen) < points and (proposal := grid.propose()) is not None:
        chosen.append(proposal.key)
        grid.add(proposal.key, float(time[row[proposal.key]]))
    return np.array(sorted(row[key] for key in chosen))


def spread_points(points: Floats, count: int) -> Ints:
    """Rows of ``count`` points over two sizes, each as far from the others as possible (in
    octaves), from the corner of the smallest sizes on."""
    where = coordinates(points[:, 0], points[:, 1])
    where = (where - where.min(axis=0)) / np.ptp(where, axis=0)
    chosen = [int(np.argmin(where.sum(axis=1)))]
    distance = np.full(len(points), np.inf)
    for _ in range(count - 1):
        distance = np.minimum(distance, ((where - where[chosen[-1]]) ** 2).sum(axis=1))
        chosen.append(int(np.argmax(distance)))
    return np.sort(np.array(chosen))


def _by_shape(rows: pd.DataFrame) -> Iterator[tuple[GemmShape, Floats, Floats]]:
    for _, part in rows.groupby(["n", "k"], sort=False):
        points, time = _medians(part, ["m"])
        yield GemmShape(*part[["n", "k"]].iloc[0].tolist()), points[:, 0], time


def _medians(rows: pd.DataFrame, sizes: list[str]) -> tuple[Floats, Floats]:
    """Distinct points and the median time in seconds of each."""
    median = rows.groupby(sizes)["time_us"].median().reset_index()
    return median[sizes].to_numpy(np.float64), 1e-6 * median["time_us"].to_numpy(np.float64)


def gemm_in_range(datasets: Path) -> Iterator[Score]:
    """A6000 GEMMs at every token count to 2048, from 100 points each."""
    parts, layer, untouched = [], np.zeros((2, 2048)), np.ones(2048, bool)
    for shape, tokens, time in _by_shape(data.llmservingsim_gemm(datasets)):
        table = OpTable("gemm", tokens[:, None], time, linear_fit, linear_fit, TILE)
        grid = adaptive_grid(tokens, time, 100)
        off, inside, rest = _fitted_to(table, grid)
        parts.append((off, inside))
        predicted = time.copy()
        predicted[rest] *= np.exp(off)
        count = data.LAYER.count((shape.n, shape.k))
        layer += count * np.stack([predicted, time])
        untouched[grid if count else []] = False
    of = ("A6000 (LLMServingSim)", "100 points an op")
    yield _score("GEMM in range", *of, parts)
    off = np.log(layer[0] / layer[1])[untouched]
    yield _score("GEMMs of a layer in range", *of, [(off, None)])


def gemm_beyond(datasets: Path) -> Iterator[Score]:
    """GEMMs up to 1024 tokens, extrapolated to 4096 (A6000: 2048), from one bundle's shapes."""
    sources = {
        "A100 (Vidur)": vidur.gemms_by_tp(datasets, "a100"),
        "A40 (Vidur)": vidur.gemms_by_tp(datasets, "a40"),
        "A6000 (LLMServingSim)": iter([data.llmservingsim_gemm(datasets)]),
    }
    for source, bundles in sources.items():
        parts = []
        for rows in bundles:
            gemms = {str(of[0]): of for of in _by_shape(rows[rows["m"] <= 4096])}
            for name, (shape, tokens, time) in gemms.items():
                others = {other: of for other, of in gemms.items() if other != name}
                fit = far_gemm(shape, others, float(tokens[-1]))
                table = OpTable("gemm", tokens[:, None], time, linear_fit, fit, TILE, shape)
                parts.append(_fitted_to(table, np.flatnonzero(tokens <= 1024))[:2])
        yield _score("GEMM beyond the range", source, "to 1024 tokens", parts)


def gemm_unseen(datasets: Path) -> Iterator[Score]:
    """GEMMs of a held-out model, from the GPU's other models (Vidur), by the device models' form: a
    roofline with learned residual, over all shapes at once."""
    for name, device in (("a100", "a100-80g-sxm"), ("a40", "a40")):
        of, spec = (f"{name.upper()} (Vidur)", "the other models"), load_device(device)
        bundles = [on(rows, spec) for rows in vidur.gemms_by_tp(datasets, name)]
        numbered = [rows.assign(bundle=i) for i, rows in enumerate(bundles)]
        everything = pd.concat(numbered, ignore_index=True)
        # A shape that a model shares with others is not fitted either.
        shapes, model = pd.MultiIndex.from_frame(everything[["n", "k"]]), everything["model"]
        own = [(model == name).to_numpy() for name in np.unique(model)]
        folds = [(np.flatnonzero(~shapes.isin(shapes[m])), np.flatnonzero(m)) for m in own]
        scores = held_out(GEMM, everything, folds)
        layers = scores.groupby(["bundle", "m"])[["predicted_us", "time_us"]].sum()
        of_what = {"GEMM of an unseen shape": scores, "GEMMs of an unseen layer": layers}
        for what, rows in of_what.items():
            errors = np.log(rows["predicted_us"].to_numpy() / rows["time_us"].to_numpy())
            yield _score(what, *of, [(errors, None)])


def attention(datasets: Path) -> Iterator[Score]:
    """Attention over two sizes from designed points."""
    prompts, decodes = data.llmservingsim_attention(datasets)
    prefill = ("prefill", ["chunk", "context"], surface_fit(prefill_surface), TILE)
    decode = ("decode", ["batch", "context"], surface_fit(decode_surface), None)
    for (kind, sizes, fit, tile), source, rows, count in (
        (prefill, "A100 (Vidur)", vidur.prefill(datasets), 300),
        (prefill, "A6000 (LLMServingSim)", prompts, 80),
        (decode, "A100 (Vidur)", vidur.decode(datasets), 200),
        (decode, "A6000 (LLMServingSim)", decodes, 200),
    ):
        points, time = _medians(rows, sizes)
        table = OpTable("attention", points, time, fit, fit, tile)
        part = _fitted_to(table, spread_points(points, count))[:2]
        yield _score(f"attention, {kind}", source, f"{count} points", [part])


def messages(datasets: Path) -> Iterator[Score]:
    """All-reduces of 2 MB and more, and transfers, from 26 sizes."""
    reduces = {f"A40, {n} GPUs (Vidur)": vidur.all_reduce(datasets, n) for n in (2, 4, 8)}
    sends = {
        "A100 inside a node (Vidur, 2023)": vidur.p2p_2023(datasets, "intra_node"),
        "A100 between nodes (Vidur, 2023)": vidur.p2p_2023(datasets, "inter_node"),
    }
    for what, sources, least in (("all-reduce from 2 MB", reduces, 2e6), ("transfer", sends, 0)):
        for source, rows in sources.items():
            points, time = _medians(rows, ["num_bytes"])
            size = points[:, 0]
            wanted = np.geomspace(max(size[0], 1024), size[-1], 26)
            grid = np.unique([int(np.argmin(np.abs(size - w))) for w in wanted])
            table = OpTable("message", points, time, linear_fit, linear_fit)
            off, inside, rest = _fitted_to(table, grid)
            kept = size[rest] >= least
            part = off[kept], inside[kept]
            yield _score(what, source, f"{len(grid)} sizes", [part])


STUDIES: dict[str, Callable[[Path], Iterator[Score]]] = {
    "GEMMs in range": gemm_in_range,
    "GEMMs beyond": gemm_beyond,
    "attention": attention,
    "messages": messages,
    "unseen GEMMs": gemm_unseen,
}


_FEW_ROWS = 250
_BAND = "band of few rows: the half-width of every second one, tried on the others"
_VARIANTS = {
    r"\.\d+w\d+$": ", windows",
    r"\.mla$": ", latent",
    r"\.dsa\d+-": ", sparse",
    r"\.state\.": ", recurrent",
}


def shipped_stacks() -> list[StackSpec]:
    """Every shipped stack, in the order of the devices, of which all have vLLM's kernels."""
    return [
        load_stack(device, stack)[0]
        for device, stack in product(fitted_devices("vllm"), STACKS)
        if device in fitted_devices(stack)
    ]


def scores_of(spec: StackSpec) -> Iterator[Score]:
    """The stored held-out scores of a stack's surfaces."""
    for table, fit in spec.kernels.items():
        family, _, which = table.partition(".")
        source, of = f"{spec.device}, {spec.stack} {fit.version}", f"{spec.device} {table}"
        variant = next((called for form, called in _VARIANTS.items() if re.search(form, of)), "")
        for kind, left in fit.left_out.items():
            hold = AIMS["kernels"].get(family, {}).get(kind, {"called": kind})
            apart = (why for form, why in hold.get("apart", {}).items() if re.search(form, of))
            aim = tuple(hold["aim"]) if "aim" in hold else None
            names = (f"{family} {which}", source, f"all but {hold['called']}")
            group, errors = f"{family}{variant}: {hold['called']}", (left.median_pct, left.p95_pct)
            score = Score(*names, left.rows, *errors, aim, left.covered_pct, group)
            cause = next(apart, hold.get("cause", ""))
            yield score.because(cause, _BAND if left.rows < _FEW_ROWS else "")
