"""Tables that a stack lacks on a GPU, borrowed from another GPU of its architecture.

Times are the lender's, multiplied by the median ratio of the tables of the same kind (GEMMs,
experts, prompts, decodes) that both GPUs have. Only what would be refused is borrowed. All-reduces
are not: links differ. Nor is sparse attention, whose tables are laws, not times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..facts.ops import MOE
from ..facts.roofline import Array
from .stack_file import (
    BLACKWELL,
    HOPPER,
    STEPS,
    Arrays,
    Chosen,
    KernelFit,
    StackSpec,
    alone_of,
    family_of,
    load_stack,
    stacks_on,
    stored,
)

#: In the version of a borrowed table, after its lender.
BY_RATIO = "by the ratio"
#: GPUs of one architecture. A GPU borrows from the first other one that has the table.
ALIKE = (BLACKWELL, HOPPER)
#: Percent by which nine in ten times of borrowed tables are off at most. Every number format (or
#: cache format and head dimension) that two GPUs of :data:`ALIKE` have was borrowed by the ratio of
#: the other ones, and compared at all common sizes (tests/profiler/test_borrowed.py).
LENT_PCT = {"gemm": 13.8, "attention": 14.4, MOE: 15.0}
#: The logarithm of each kind of table, and its axes.
_GRIDS = {
    "gemm": ("log_rate", ("n", "k", "m")),
    MOE: ("log_ratio", ("shapes", "tokens")),
    **dict.fromkeys(("prefill", "decode", "added"), ("log_us", ("heads", "size0", "size1"))),
}
#: So many tables of a ratio are named.
_NAMED = 4


@lru_cache(maxsize=64)
def differences(device: str, lender: str, stack: str, kind: str) -> Mapping[str, Array]:
    """How much slower ``device`` is than ``lender``, as logarithms, at the common sizes of each
    table of this kind that both have of the same version of the stack."""
    (mine, own), (theirs, lent) = (load_stack(name, stack) for name in (device, lender))
    found = dict[str, Array]()
    for table, fit in mine.kernels.items():
        other = theirs.kernels.get(table)
        if table.startswith(f"{kind}.") and other and other.version == fit.version:
            ours, others = stored(own, table), stored(lent, table)
            log, axes = _GRIDS[kind]
            if log in ours and log in others:
                at = [_common(ours[name], others[name]) for name in axes if name in ours]
                here, there = (np.ix_(*places) for places in zip(*at, strict=True))
                found[table] = (ours[log][here].astype(np.float64) - others[log][there]) / STEPS
    return {table: off for table, off in found.items() if off.size}


def _common(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> tuple[list[int], list[int]]:
    """The places of the points that two axes share."""
    rows, others = ({str(row): at for at, row in enumerate(each.tolist())} for each in (one, other))
    both = [row for row in rows if row in others]
    return [rows[row] for row in both], [others[row] for row in both]


@lru_cache(maxsize=256)
def _loan(device: str, stack: str, table: str) -> tuple[KernelFit, Arrays] | None:
    """A table of another GPU as it would be on this one; None where no GPU alike has it."""
    kind, engine = table.partition(".")[0], stack.partition("@")[0]
    log = _GRIDS[kind][0] if kind in _GRIDS else ""
    for lender in next((group for group in ALIKE if device in group), ()):
        if lender == device or engine not in stacks_on(lender):
            continue
        spec, every = load_stack(lender, stack)
        arrays, off = stored(every, table), differences(device, lender, engine, kind)
        if log in arrays and off:
            steps = round(STEPS * float(np.median([np.median(one) for one in off.values()])))
            named = ", ".join(off) if len(off) <= _NAMED else f"{len(off)} tables {kind}"
            ratio = f"{np.exp(steps / STEPS):.2f} of {named}"
            about = replace(
                spec.kernels[table],
                version=f"{spec.kernels[table].version} from {lender} {BY_RATIO} {ratio}",
                lender=lender,
                lent_pct=LENT_PCT[family_of(table)],
            )
            lent = {**arrays, log: arrays[log] + np.int16(steps)}
            return about, {f"{table}.{name}": array for name, array in lent.items()}
    return None


def with_borrowed(device: str, stack: str, needed: Iterable[str]) -> tuple[StackSpec, Arrays]:
    """A stack with those of the ``needed`` tables that another GPU can lend it. Raises SpecError as
    :func:`load_stack`."""
    spec, arrays = load_stack(device, stack)
    missing = [table for table in needed if alone_of(table) not in spec.kernels]
    loans = {table: loan for table in missing if (loan := _loan(device, stack, table))}
    if not loans:
        return spec, arrays
    where = dict.fromkeys(arrays, arrays)
    for _, lent in loans.values():
        where |= dict.fromkeys(lent, lent)
    fits = {table: fit for table, (fit, _) in loans.items()}
    return replace(spec, kernels=spec.kernels | fits), Chosen(where)
