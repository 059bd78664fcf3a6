"""Latent attention from public tables, as rows of a prefill or decode table.

Some stacks publish the kernel alone. Of others there is the whole block of attention: from it the
GEMMs of the same stack are taken, and the launches that nothing hid when single tokens were timed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.formats import KvDtype
from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
from sarathi_sim.profiler.kernels.stack_attention import LESS, MEASURED_LATENT
from sarathi_sim.profiler.public import kernel_tables as tables

#: The hidden state of the published blocks.
_HIDDEN = 7168
#: Above this the fastest rows (first percentile) are launches of the host: not used.
_LAUNCH_US = 40.0
#: What the kernel takes for one token and no context, where it was timed alone (10 to 13 us).
_FASTEST_US = 10.0


def latent_rows(
    datasets: Path,
    device: str,
    stack: str,
    kind: str,
    kv_dtype: KvDtype,
    gemms: GemmLattice | None,
) -> tuple[pd.DataFrame, str] | None:
    """Rows (heads, kv_heads, chunk or batch and context, time_us) and the stack's version.

    ``gemms`` are the stack's in bf16. None where nothing usable is published.
    """
    found = tables.latent(datasets, device, stack, kind, kv_dtype)
    if found is None or found[0]["time_us"].quantile(0.01) > _LAUNCH_US:
        blocks = tables.latent(datasets, device, stack, kind, kv_dtype, whole=True)
        single = tables.latent(datasets, device, stack, "decode", kv_dtype, whole=True)
        if blocks is None or single is None or gemms is None:
            return None
        if not set(blocks[0]["heads"]) <= set(single[0]["heads"]):
            return None
        least = _rest(single[0], gemms, "batch").groupby(single[0]["heads"]).min()
        launches = (least - _FASTEST_US).clip(lower=0.0).loc[blocks[0]["heads"]].to_numpy()
        rest = _rest(blocks[0], gemms, "chunk" if kind == "prefill" else "batch") - launches
        rows = blocks[0].assign(time_us=rest.clip(lower=_FASTEST_US))
        found = rows, f"{blocks[1]} {LESS}"
    rows, version = found
    # Prompts have keys for every head; decodes read one vector for all.
    return rows.assign(kv_heads=rows["heads"] if kind == "prefill" else 1), version


def _rest(rows: pd.DataFrame, gemms: GemmLattice, tokens: str) -> pd.Series[float]:
    """The block's time without its GEMMs."""
    left = rows["time_us"].copy()
    for heads, part in rows.groupby("heads"):
        count = int(str(heads))
        m = part[tokens].to_numpy(np.float64)
        left.loc[part.index] -= sum((gemms.time_us(m, n, k) for n, k in _shapes(count)), 0 * m)
    return left


def _shapes(heads: int) -> tuple[tuple[int, int], ...]:
    """(n, k) of the block's GEMMs on a rank with so many heads."""
    latent = MEASURED_LATENT
    return (
        (latent.query_rank + latent.cached, _HIDDEN),
        (heads * (latent.nope_dim + latent.rope_dim), latent.query_rank),
        (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        (_HIDDEN, heads * latent.value_dim),
    )
