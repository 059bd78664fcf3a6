"""The fit of one op of one device: its rows, its form, and its hold-outs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.physics.forms import LINK, STREAM, Form
from sarathi_sim.profiler.physics.hold_out import Folds, fold_of, leave_one_group_out
from sarathi_sim.profiler.public import vidur_frames as vidur

BINS = {
    "m": (0, 16, 64, 128, 256, 512, 1024, 4096, 40000),
    "chunk": (0, 128, 256, 512, 1024, 4096, 16384),
    "context": (0, 256, 1024, 4096, 40000),
    "num_bytes": (0, 2**14, 2**18, 2**21, 2**24, 2**40),
}
"""By what held-out errors are split: a column, and the limits of its ranges."""


@dataclass(frozen=True)
class Origin:
    """Repository with commit, and licence, of published measurements."""

    repository: str
    licence: str


AIC = Origin("ai-dynamo/aiconfigurator @095f58a", "Apache-2.0")
VIDUR = Origin("microsoft/vidur @7d47513", "MIT")
VIDUR_2023 = Origin("microsoft/vidur @aa06400 (history)", "MIT")
VIDUR_ATTENTION = Origin("microsoft/vidur @e2d00e9 (history)", "MIT")
VIDUR_A40_REDUCE = Origin("microsoft/vidur @6d98aa8 (history)", "MIT")
LLMSERVINGSIM = Origin("casys-kaist/LLMServingSim @5daddb2", "MIT")


@dataclass(frozen=True)
class HoldOut:
    """Rows with equal ``by`` columns are held out together, in ``folds`` folds.

    ``scored`` is a pandas query for the rows that count, all by default.
    """

    name: str
    by: tuple[str, ...]
    folds: int
    scored: str | None = None

    def splits(self, rows: pd.DataFrame) -> Folds:
        """What to fit and what to score, a pair a fold; ``rows`` must have a plain index."""
        scored = np.full(len(rows), self.scored is None)
        if self.scored is not None:
            scored[rows.query(self.scored).index] = True
        return leave_one_group_out(fold_of(rows[list(self.by)], self.folds), scored)


@dataclass(frozen=True, eq=False)
class Study:
    """One op of one device. The column ``bin_by``, one of :data:`BINS`, splits the held-out errors.

    ``again`` is a second hold-out, reported beside the first; ``checks`` are named rows of other
    sources, never fitted; ``stack_pct`` is what another stack's kernels add to the band.
    """

    op: str
    form: Form
    rows: pd.DataFrame
    hold_out: HoldOut
    source: str
    origin: Origin
    bin_by: str
    notes: str = ""
    checks: dict[str, pd.DataFrame] = field(default_factory=dict)
    again: HoldOut | None = None
    stack_pct: float = 0.0


def on(frame: pd.DataFrame, device: DeviceSpec) -> pd.DataFrame:
    """The rows with the hardware columns of the device they were measured on."""
    return frame.assign(
        peak_flops=device.peak_flops,
        bandwidth=device.memory_bandwidth,
        num_sms=float(device.num_sms),
    ).reset_index(drop=True)


def stream_studies(datasets: Path, name: str, device: DeviceSpec) -> Iterator[Study]:
    """The elementwise ops and the embedding, from Vidur's files for ``a100`` or ``a40``."""
    models = HoldOut("models (widths), up to 5 folds", ("model",), 5)
    counts = HoldOut("token counts, 5 folds", ("num_bytes",), 5)
    coarse = "measured to 1 us, which is 10 to 50 % of the smallest times"
    for op, rows in sorted(vidur.mlp(datasets, name).items()):
        if op == "gemm":
            continue
        several = rows["model"].nunique() > 1
        yield Study(
            op=op,
            form=STREAM,
            rows=on(rows, device),
            hold_out=models if several else counts,
            source=f"{name.upper()} {op} kernels of Vidur's MLP profiles",
            origin=VIDUR,
            bin_by="num_bytes",
            notes=coarse if several else f"{coarse}; one model (phi-2): no width is held out",
        )


def link_study(
    op: str, rows: pd.DataFrame, device: DeviceSpec, source: str, origin: Origin
) -> Study:
    """A collective or point-to-point message by size."""
    return Study(
        op=op,
        form=LINK,
        rows=on(rows, device),
        hold_out=HoldOut("message sizes, up to 21 folds", ("num_bytes",), 21),
        source=source,
        origin=origin,
        bin_by="num_bytes",
    )
