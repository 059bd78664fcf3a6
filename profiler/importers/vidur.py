"""Vidur's profiles: per-op times of whole models on A100 and A40, attention on one A100 rank.

The reader handles these traps: times are milliseconds; gate and up are one GEMM of 2 x ffn / tp
columns; a token count may occur twice; ``add`` runs twice a layer; kv_cache_size is before the
chunk, and per sequence; messages are bytes; a tensor-parallel rank sends its share only; ranks
spread over nodes are in the same files as ranks of one node.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from sarathi_sim.experiments.lab.fit.devices import VIDUR
from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.importers.assemble import (
    Part,
    Publication,
    assemble,
    half_octaves,
    listed,
)
from sarathi_sim.profiler.importers.shapes import ShapePool, attention_part
from sarathi_sim.profiler.physics.shard_times import DeviceModel
from sarathi_sim.profiler.public import vidur_frames as vidur
from sarathi_sim.profiler.public.measured_csv import merged, source_folder
from sarathi_sim.profiler.public.vidur_frames import GEMMS, OTHERS, median_of

_MILLI = 1e3
_ATTENTION_FILE = "attention_a100_CodeLlama-34b_tp2.csv"


def import_vidur(folder: Path, model: ModelSpec, tp: int, device: DeviceSpec) -> Bundle:
    """A bundle from the folder of Vidur's files; the model is found by its architecture.

    The first part of a file's name (``a100``, ``a40``) gives ``device``. Raises
    FileNotFoundError for a folder without files of the device, BundleError for one without the
    model's shapes.
    """
    gpu = device.name.split("-")[0]
    files = vidur.files(folder, gpu)
    if not files:
        raise FileNotFoundError(
            f"vidur: {source_folder(folder, 'vidur')} has no mlp_{gpu}_MODEL.csv, so nothing was "
            f"measured on {device.name}; devices there: {listed(_devices(folder))}"
        )
    parts: dict[str, Part] = {}
    for name, path in files.items():
        raw = vidur.read_mlp(path)
        if _is(model, raw.iloc[0]):
            parts = _layer(raw[raw["num_tensor_parallel_workers"] == tp], name, tp)
            break
    _fill_gemms(parts, folder, gpu, model, tp, device)
    parts |= _attention(folder, gpu, model, tp, device)
    parts |= _messages(folder, gpu, tp)
    source = Publication(
        "vidur", VIDUR, f"NVIDIA {gpu.upper()}, as the repository has it", "float16"
    )
    return assemble(source, device, model, tp, parts)


def _devices(folder: Path) -> list[str]:
    files = source_folder(folder, "vidur").glob("mlp_*_*.csv")
    return sorted({path.stem.split("_")[1] for path in files})


def _is(model: ModelSpec, row: pd.Series[int]) -> bool:
    wanted = (model.num_heads, model.num_kv_heads, model.hidden_size, model.ffn_hidden_size)
    have = (row["n_head"], row["n_kv_head"], row["n_embd"], row["n_expanded_embd"])
    gated = str(row["use_gated_mlp"]).lower() == "true"
    return wanted == have and gated == model.gated_ffn and not model.learned_positions


def _layer(raw: pd.DataFrame, name: str, tp: int) -> dict[str, Part]:
    """The parts of the model's own file at ``tp``; none if it lacks this degree."""
    if raw.empty:
        return {}
    tokens = raw["num_tokens"]

    def part(time_ms: pd.Series[float], op: str) -> Part:
        rows = merged(pd.DataFrame({"num_tokens": tokens, "time_us": _MILLI * time_ms}))
        return Part(rows, "measured", f"{op} of {name}, tp {tp}")

    found = {ours: part(raw[median_of(theirs)], theirs) for ours, theirs in GEMMS.items()}
    found["embedding"] = part(raw[median_of("emb")], "emb")
    if all(median_of(op) in raw for op in OTHERS):
        total = sum((n * raw[median_of(op)] for op, n in OTHERS.items()), 0.0 * tokens)
        names = " + ".join(f"{n} x {op}" if n > 1 else op for op, n in OTHERS.items())
        found["others"] = Part(part(total, "").rows, "combined", f"{names} of {name}, tp {tp}")
    return found


def _fill_gemms(
    parts: dict[str, Part], folder: Path, gpu: str, model: ModelSpec, tp: int, device: DeviceSpec
) -> None:
    """GEMMs that the model's own file lacks, from the shapes of all models."""
    lacking = {op: s for op, s in model.gemms(tp).items() if op not in parts}
    if not lacking:
        return
    pool = ShapePool(vidur.mlp(folder, gpu)["gemm"], device, f"mlp_{gpu}_*.csv")
    for op, shape in lacking.items():
        found = pool.part(shape)
        if found is not None:
            parts[op] = found


def _attention(
    folder: Path, gpu: str, model: ModelSpec, tp: int, device: DeviceSpec
) -> dict[str, Part]:
    if gpu != "a100" or not (source_folder(folder, "vidur") / _ATTENTION_FILE).is_file():
        return {}
    if device.fitted is None and model.heads_per_rank(tp) != (32, 4):
        return {}
    times = DeviceModel(device.name)
    readers = {"attn_prefill": vidur.prefill, "attn_decode": vidur.decode}
    origin = f"{_ATTENTION_FILE} (paged FlashAttention)"
    parts = {
        op: attention_part(op, read(folder), model, tp, times, origin)
        for op, read in readers.items()
    }
    return {op: part for op, part in parts.items() if part is not None}


def _messages(folder: Path, gpu: str, tp: int) -> dict[str, Part]:
    """All-reduce inside a node, and point to point, where the folder has the files."""
    here = source_folder(folder, "vidur")
    binned = "medians over half octaves, never faster when larger"
    found: dict[str, Part] = {}
    reduce = {"a100": "all_reduce_a100_dgx.csv", "a40": "all_reduce_a40.csv"}.get(gpu)
    if reduce and tp > 1 and (here / reduce).is_file():
        rows = vidur.all_reduce(folder, reduce, tp)
        if len(rows):
            origin = f"{reduce}, {tp} GPUs of one node; {binned}"
            found["all_reduce"] = Part(half_octaves(rows), "combined", origin)
    for scope in ("inter_node", "intra_node"):
        if gpu == "a100":
            name = f"p2p_a100_{scope}_2023_n_embd_not_12288.csv"
            read = vidur.p2p_2023
        else:
            name, read = f"send_recv_{gpu}.csv", vidur.send_recv_a40
        if gpu in ("a100", "a40") and (here / name).is_file():
            rows = half_octaves(read(folder, scope))
            found[f"send_recv_{scope}"] = Part(rows, "combined", f"{name}; {binned}")
    return found
