"""LLMServingSim's ``profiler/perf`` folders: vLLM's own kernels, op by op.

A folder of one model holds ``meta.yaml`` and, beside it or below ``tp<k>/``, ``dense.csv`` (ops by
tokens, one layer), ``per_sequence.csv`` (ops by sequences) and ``attention.csv``: a chunk of
``prefill_chunk`` tokens after ``kv_prefill`` cached ones, in one call with ``n_decode`` decodes of
``kv_decode`` tokens each.

The reader handles these traps: times are microseconds; a layer has two norms, and the file has the
time of one; the kernels were launched one by one (``enforce_eager``), so times hold no launches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_sim.profiler.bundle.tables import BundleError
from sarathi_sim.profiler.facts.ops import OPS
from sarathi_sim.profiler.public.measured_csv import merged, read_measurements
from sarathi_sim.profiler.storage.plain_yaml import read_mapping

META, DENSE, BY_SEQUENCE, ATTENTION = "meta.yaml", "dense.csv", "per_sequence.csv", "attention.csv"
#: How often each of its layers runs in one of our ops. The last norm goes with the embedding: both
#: run once, over all tokens.
LAYERS: dict[str, dict[str, int]] = {
    "preproj": {"qkv_proj": 1},
    "postproj": {"o_proj": 1},
    "ffn_ln1": {"gate_up_proj": 1},
    "ffn_ln2": {"down_proj": 1},
    "others": {"layernorm": 2, "act_fn": 1, "rotary_emb": 1},
    "embedding": {"embedding": 1, "final_layernorm": 1},
    "lm_head": {"lm_head": 1, "sampler": 1},
}


def is_perf(folder: Path) -> bool:
    """Whether the folder has this form."""
    return (folder / META).is_file() and any(folder.glob(f"**/{DENSE}"))


def perf_meta(folder: Path) -> dict[str, Any]:
    """The metadata of the folder."""
    return dict(read_mapping(folder / META))


def degree_folder(folder: Path, tp: int) -> Path:
    """Where the tables of ``tp`` ranks are. Raises BundleError where these were not measured."""
    here = folder / f"tp{tp}" if (folder / f"tp{tp}").is_dir() else folder
    degrees = perf_meta(folder).get("tp_degrees", [1])
    if tp not in degrees or (here == folder and degrees != [tp]):
        raise BundleError(f"{folder / META}: tp_degrees {degrees}: --tp {tp} was not measured")
    return here


def op_rows(here: Path, op: str, layers: dict[str, int] | None = None) -> tuple[pd.DataFrame, str]:
    """One of our ops (num_tokens, time_us), the sum of ``layers`` (default: its own) at the sizes
    that all of them have; and that sum as text."""
    name, column = (BY_SEQUENCE, "sequences") if OPS[op].outputs else (DENSE, "tokens")
    rows = read_measurements(
        here / name, labels=("layer",), counts=(column,), times=("time_us",)
    ).rename(columns={column: "num_tokens"})
    total: pd.Series[float] | None = None
    summed = layers or LAYERS[op]
    for layer, times in summed.items():
        mine = rows[rows["layer"] == layer].groupby("num_tokens")["time_us"].median()
        if mine.empty:
            there = ", ".join(sorted(set(rows["layer"])))
            raise BundleError(f"{here / name}: no rows of {layer}; there are {there}")
        total = times * mine if total is None else (total + times * mine).dropna()
    assert total is not None
    text = " + ".join(f"{n} x {layer}" if n > 1 else layer for layer, n in summed.items())
    return total.rename("time_us").reset_index(), f"{text} of {name}"


def attention_cells(here: Path) -> pd.DataFrame:
    """Every call of ``attention.csv``."""
    sizes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    return read_measurements(here / ATTENTION, from_zero=sizes, times=("time_us",))


def alone(cells: pd.DataFrame, sizes: dict[str, str]) -> pd.DataFrame:
    """Calls over a chunk alone or over decodes alone: these ``sizes``, by their new names."""
    chunks, decodes = cells["prefill_chunk"] > 0, cells["n_decode"] > 0
    only = chunks & ~decodes if "prefill_chunk" in sizes else decodes & ~chunks
    return merged(cells[only][[*sizes, "time_us"]].rename(columns=sizes))
