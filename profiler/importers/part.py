"""A part of an imported bundle: rows, and their origin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

#: How a part came about, from the most to the least direct.
Kind = Literal["measured", "combined", "interpolated", "scaled", "modelled"]


@dataclass(frozen=True, eq=False)
class Part:
    """One op's rows: the key columns of its table and ``time_us``.

    ``kind``: ``measured`` as the source has it, ``combined`` from several measured numbers,
    ``interpolated`` over GEMM shapes, ``scaled`` to another head count, or ``modelled`` by a
    calibrated device. ``origin`` is for the reader of ``meta.yaml``.
    """

    rows: pd.DataFrame
    kind: Kind
    origin: str

    def mark(self) -> str:
        """One line for ``meta.yaml``."""
        return f"{self.kind}: {self.origin}"


def half_octaves(rows: pd.DataFrame) -> pd.DataFrame:
    """Messages (num_bytes, time_us) thinned to two sizes an octave, never faster when larger.

    Published small messages scatter by a factor of two; a median over half an octave smooths them.
    Each bin gives its median size and median time; then a running maximum is taken.
    """
    bins = np.floor(2 * np.log2(rows["num_bytes"])).astype(int)
    thin = rows.groupby(bins.to_numpy())[["num_bytes", "time_us"]].median()
    thin["num_bytes"] = thin["num_bytes"].round().astype(int)
    thin["time_us"] = thin["time_us"].cummax()
    return thin.drop_duplicates("num_bytes").reset_index(drop=True)


def listed(names: Iterable[object]) -> str:
    """``a, b, c``; ``none`` where there is nothing."""
    return ", ".join(str(name) for name in names) or "none"
