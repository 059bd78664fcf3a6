"""Errors of the stacks' kernels on rows left out of their fits; why some miss the aims."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sarathi_sim.experiments.figures.accuracy import Aim, Score
from sarathi_sim.profiler.facts.formats import STACKS
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ALL_TO_ALL, MOE
from sarathi_sim.profiler.kernels.stack_file import LeftOut, StackSpec, load_stack
from sarathi_sim.profiler.kernels.stack_fit import check_fitted, fit_stack, fitted_devices
from sarathi_sim.profiler.kernels.wide_times import WIDE


class Hold(NamedTuple):
    """The hold-out of a family's tables, the aim, and the causes of misses.

    ``apart`` are the causes for tables whose device and name match a pattern. Shares "of what is
    far off" are of the rows with errors above 12 % on H100, B200 and L40S.
    """

    called: str
    aim: Aim | None = None
    cause: str = ""
    apart: tuple[tuple[str, str], ...] = ()


_GEMM, _ATTENTION, _MESSAGES, _EXPERTS = (2.0, 8.0), (3.0, 12.0), (5.0, 15.0), (5.0, 20.0)
_HEADS = "each pair of head counts between others"
_WAVES = "kernels change from 128 to 1,024 tokens (Blackwell: steps of 2 us); long prompts scatter"
_SPLITS = "kernels change with batch and context; a cache outgrows L2 ({} of what is far off)"
_PROTOCOLS = "times jump as the protocol changes (0.1 to 8 MB); neighbours 4 x apart (in use 2 x)"
_HEADS_WAVES = "long prompts scatter by 4 %, some rows by more; few pairs of head counts in a table"
_MLA, _DSA, _STATE = r"\.mla$", r"\.dsa\d+-", r"\.state\."
_BLOCKS = (
    "five rates for all sizes; what is left of a block without its GEMMs and launches scatters"
)

#: By a table's family and the kind of the errors.
LEFT_OUT: dict[tuple[str, str], Hold] = {
    ("gemm", "between"): Hold("token counts that are no knots", _GEMM),
    ("gemm", "token pairs"): Hold("each pair of token counts"),
    ("gemm", "shapes"): Hold(
        "every other n or k (of few, each shape)", (5.0, 15.0),
        "the library chooses its kernel by n: the errors lie along n",
    ),
    ("gemm", "beyond"): Hold("the largest n, k and m"),
    ("prefill", "sizes"): Hold(
        "each chunk size", _ATTENTION, _WAVES,
        (("^rtx-4090", "six rows, of one pair of head counts"), (_DSA, _BLOCKS)),
    ),
    ("prefill", "heads"): Hold(
        _HEADS, _ATTENTION,
        _HEADS_WAVES,
        (
            (_MLA, f"{_HEADS_WAVES}; neighbours 4 x apart (in use all are measured)"),
            (_DSA, _BLOCKS),
        ),
    ),
    ("prefill", "beyond"): Hold("the fewest and the most heads"),
    ("prefix", "sizes"): Hold(
        "each chunk and context", _ATTENTION,
        "the kernel splits the keys of short chunks; neighbours 4 x apart (in use 2 x)",
    ),
    ("added", "batches"): Hold(
        "every other batch between one prompt and the most", _ATTENTION,
        "times bend where blocks fill the GPU (40 % of what is far off) and where prompts outgrow "
        "L2 (22 %; L40S 32 %); neighbours 4 x apart (in use 2 x)",
    ),
    ("decode", "sizes"): Hold(
        "every other batch or context", _ATTENTION, _SPLITS.format("19 %"),
        (
            (r"w\d+$", "times bend at the window (20 %); " + _SPLITS.format("13 %")),
            (_MLA, _SPLITS.format("16 %")),
            (_DSA, "kernels change at the tokens that an indexer picks; blocks scatter"),
        ),
    ),
    ("decode", "heads"): Hold(
        _HEADS, _ATTENTION,
        "groups above 16 heads and MHA use other kernels (52 % of what is far off)",
        ((_MLA, "kernels change from 16 to 64 heads (in use all are measured)"),),
    ),
    ("decode", "beyond"): Hold("the smallest and the largest groups of heads"),
    ("elementwise", "sizes"): Hold("each token count"),
    (MOE, "between"): Hold(
        "token counts that are no knots", _EXPERTS,
        "the few shapes of two to four models, half of which chose the knots",
    ),
    (MOE, "shapes"): Hold(
        "each model's shapes", _EXPERTS,
        "stacks run other kernels for some models and shapes, some badly; the others do not say",
        (("mxfp4", "two to four models in all: one says little about another"),),
    ),
    (MOE, "beyond"): Hold("models that choose another number of experts"),
    (ALL_REDUCE, "sizes"): Hold("each message size", _MESSAGES, _PROTOCOLS),
    (ALL_TO_ALL, "sizes"): Hold("each message size", _MESSAGES, _PROTOCOLS),
    (WIDE, "between"): Hold(
        "token counts that are no knots", _EXPERTS,
        "few token counts; the shapes of few models, half of which chose the knots",
    ),
    (WIDE, "ranks"): Hold(
        "each number of ranks between others", _EXPERTS,
        "other kernels or protocols serve some numbers of ranks; neighbours 4 x apart",
    ),
    (WIDE, "shapes"): Hold("each model's shapes"),
    (WIDE, "beyond"): Hold("models that choose another number of experts"),
    (WIDE, "sizes"): Hold("each number of tokens or message size", _MESSAGES, _PROTOCOLS),
}  # fmt: skip

_FEW_ROWS = 250
_BAND = "band of few rows: the half-width of every second one, tried on the others"
_VARIANTS = {r"\.\d+w\d+$": ", windows", _MLA: ", latent", _DSA: ", sparse", _STATE: ", recurrent"}


def kernels(datasets: Path, device: str) -> Iterator[Score]:
    """The held-out scores of every stack's surfaces on a device, fitted again.

    Raises SpecError for a device without published kernels.
    """
    check_fitted(device, STACKS[0])
    for stack in STACKS:
        if device in fitted_devices(stack):
            yield from scores_of(fit_stack(datasets, device, stack)[0])


def shipped(datasets: Path, device: str) -> Iterator[Score]:
    """The held-out scores stored with the shipped surfaces: reads no ``datasets``."""
    for stack in STACKS:
        if device in fitted_devices(stack):
            yield from scores_of(load_stack(device, stack)[0])


def scores_of(spec: StackSpec) -> Iterator[Score]:
    """The stored held-out scores of a stack's surfaces."""
    for table, fit in spec.kernels.items():
        source = f"{spec.device}, {spec.stack} {fit.version}"
        for kind, left in fit.left_out.items():
            yield _score(spec.device, table, kind, source, left)


def variant(table: str) -> str:
    """The variant of an attention table: within windows, latent, sparse, or recurrent layers."""
    return next((called for pattern, called in _VARIANTS.items() if re.search(pattern, table)), "")


def _score(device: str, table: str, kind: str, source: str, left: LeftOut) -> Score:
    family, _, which = table.partition(".")
    hold = LEFT_OUT.get((family, kind), Hold(kind))
    of = f"{device} {table}"
    cause = next((why for pattern, why in hold.apart if re.search(pattern, of)), hold.cause)
    score = Score(
        f"{family} {which}", source, f"all but {hold.called}", left.rows, left.median_pct,
        left.p95_pct, hold.aim, left.covered_pct, f"{family}{variant(table)}: {hold.called}",
    )  # fmt: skip
    return score.because(cause, _BAND if left.rows < _FEW_ROWS else "")
