"""From the public tables to a stack's surfaces: cleaning, fits, and errors.

Of latent attention some stacks publish the kernel alone. Of others there is the whole block of
attention: from it the GEMMs of the same stack are taken, and the launches that nothing hid when
single tokens were timed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.profiler.facts import formats
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import (
    ALL_REDUCE,
    ALL_TO_ALL,
    ATTENTION_GEMMS,
    MOE,
    OTHERS,
    names,
)
from sarathi_sim.profiler.facts.roofline import HBM_SHARE, Array
from sarathi_sim.profiler.kernels import stack_attention as attention
from sarathi_sim.profiler.kernels.attention_grid import (
    fastest_us,
    fit_added,
    fit_decode,
    fit_prefill,
    fit_prefix,
)
from sarathi_sim.profiler.kernels.gemm_lattice import (
    FastestGemm,
    GemmLattice,
    choose_knots,
    fit_lattice,
    gemm_cube,
    rising,
    through,
)
from sarathi_sim.profiler.kernels.message_curves import fit_exchange, fit_reduce, stream_bytes
from sarathi_sim.profiler.kernels.moe_surface import (
    Rates,
    choose_tokens,
    fit_moe,
    groups,
    moe_table,
    rates_of,
)
from sarathi_sim.profiler.kernels.sparse_law import fit_sparse
from sarathi_sim.profiler.kernels.stack_file import (
    Arrays,
    KernelFit,
    StackSpec,
    family_of,
    gemms_beside,
    load_stack,
)
from sarathi_sim.profiler.kernels.wide_times import GATHERS, MODES, PARTS, WIDE
from sarathi_sim.profiler.storage.child import Say, silent
from sarathi_sim.profiler.storage.strict import SpecError, did_you_mean
from ..sources import aiconfigurator as tables
from ..sources import llmservingsim as perf
from ..sources.aiconfigurator import Published, Table
from ..sources.measurements import source_folder
from . import holdout
from .devices import ORIGINS, today
from .holdout import Errors, Fitted, fitted, microseconds

AnyGemm = GemmLattice | FastestGemm

#: Families of tables that are fitted together.
FAMILIES = ("gemm", "attention", MOE, ALL_REDUCE, ALL_TO_ALL, "elementwise", WIDE)
#: Devices of LLMServingSim's profiles: the folder, and the model that ran on one GPU.
PERF = {"rtx-4090": ("llmservingsim_rtx4090", "llama-3.1-8b")}


def fitted_devices(stack: str) -> list[str]:
    """The devices with published kernels of a stack."""
    return [*tables.SYSTEMS, *(PERF if stack == "vllm" else ())]


def check_fitted(device: str | None, stack: str) -> list[str]:
    """The devices to fit: one, or all whose kernels are published. Raises SpecError for a device or
    a stack that is not among the tables."""
    stack = stack.partition("@")[0]
    devices = fitted_devices(stack)
    for what, name, known in (("device", device, devices), ("stack", stack, formats.STACKS)):
        if name is not None and name not in known:
            raise SpecError(
                f"{what} {name!r} has no published kernels{did_you_mean(name, known)}; "
                f"allowed: {', '.join(known)}"
            )
    return [device] if device else devices


def fit_stack(
    datasets: Path,
    device: str,
    stack: str,
    progress: Say = silent,
    families: Collection[str] = FAMILIES,
) -> tuple[StackSpec, Arrays]:
    """Every surface of one stack on one device; deterministic but for its date, today.

    Tables of other families than those named stay as they are shipped. Of a version (``vllm@0.19``)
    only those that differ from the newest are fitted; GEMMs and attention are not scored.
    Raises FileNotFoundError for a missing folder, BundleError for a table that cannot be used.
    """
    fits, arrays = dict[str, KernelFit](), dict[str, npt.NDArray[Any]]()
    order: Mapping[str, KernelFit] = {}
    engine, version = formats.named_stack(stack)
    if set(families) != set(FAMILIES) and not version:
        spec, kept = load_stack(device, stack)
        order = spec.kernels
        fits = {table: fit for table, fit in order.items() if family_of(table) not in families}
        arrays = {name: kept[name] for name in kept if family_of(name) not in families}
    shipped = load_stack(device, engine)[0].kernels if version else {}
    for found in _fits((datasets, device, stack), families):
        if version:
            newest = shipped.get(found.table)
            if newest is None or newest.version == found.version:
                continue
            if family_of(found.table) in ("gemm", "attention"):
                found = replace(found, kinds={})
        progress(f"{device} {stack}: {found.table} ({found.rows} rows)")
        fits[found.table] = found.fit
        stored = found.surface.arrays()
        arrays.update({f"{found.table}.{name}": array for name, array in stored.items()})
    fits = {table: fits[table] for table in dict.fromkeys((*order, *fits)) if table in fits}
    floor, source = _floor(datasets, device, engine)
    origin = ORIGINS["llmservingsim" if device in PERF else "aiconfigurator"]
    about = (device, stack, origin.repository, origin.licence, today())
    return StackSpec(*about, floor, source, fits), arrays


def _fits(of: Published, families: Collection[str]) -> Iterator[Fitted]:
    _, device, stack = of
    if device in PERF:
        yield from (one for one in _perf_fits(*of[:2]) if family_of(one.table) in families)
        return
    if {"gemm", "attention"} & set(families):
        yield from _gemms_and_attention(of, families)
    for dtype in formats.MOE_DTYPES if MOE in families else ():
        yield from fit_experts(expert_tables(of, dtype))
    if ALL_REDUCE in families:
        kernels = without_launches(tables.all_reduces(of), load_device(device))
        yield from _messages(ALL_REDUCE, kernels)
    if "@" in stack:
        return
    if ALL_TO_ALL in families and (table := tables.all_to_alls(of)):
        yield from _messages(ALL_TO_ALL, {"nccl": table})
    if WIDE in families:
        yield from fit_wide(of)


def _floor(datasets: Path, device: str, stack: str) -> tuple[float, str]:
    """The least time of an elementwise kernel: the fastest of the quantisation of one token."""
    if device in PERF:
        here = perf.degree_folder(source_folder(datasets, PERF[device][0]), 1)
        ones = [perf.op_rows(here, OTHERS, {layer: 1}).frame for layer in perf.LAYERS[OTHERS]]
        floor = float(np.median([rows["time_us"].iloc[0] for rows in ones]))
        return round(floor, 2), "measured: norm, activation and rotary of one token"
    # SGLang's table holds dynamic quantisation only, which is two kernels and more.
    known = "vllm" if stack == "sglang" else stack
    rows = tables.static_quantisation((datasets, device, known))
    if rows is None:  # the value on which vLLM's and SGLang's tables agree elsewhere
        return 2.1, "assumed: as on other devices"
    one = rows[(rows["m"] == 1) & (rows["k"] <= 8192)]["time_us"]
    return round(float(one.median()), 2), "measured: static fp8 quantisation of one token"


#: A table with fewer shapes is a stub.
_FEWEST_SHAPES = 100
#: Above this the fastest rows (first percentile) are launches of the host: not used.
_LAUNCH_US = 40.0
#: Least share of a GEMM's time that is left when its dynamic quantisation is subtracted.
_LEAST_SHARE = 0.25


def fit_gemm(table: str, rows: pd.DataFrame, version: str, rates: Rates | None = None) -> Fitted:
    """The surface of a table of GEMMs (m, n, k, time_us); ``rates`` are the device's, given if
    weights in L2 are to be ruled out."""
    raw = timed = gemm_cube(rows)
    if rates is not None:
        weight_us = 1e6 * rates.weight_bytes / rates.bandwidth
        raw = timed.from_memory(weight_us, 1e6 * rates.cache / rates.bandwidth)
    clean = raw.cleaned()
    # Half of the widths choose the knots, the others are scored.
    half = clean.some(
        np.arange(0, len(clean.n), 2),
        np.arange(len(clean.k)),
        range(len(clean.m)),
    )
    knots = choose_knots(lambda kept: np.log(through(half, kept) / half.time_us), len(half.m))
    kinds = holdout.gemm_kinds(rows, clean, raw, knots, few=_shapes(rows) < _FEWEST_SHAPES)
    surface, times = fit_lattice(clean, knots), (raw.time_us, clean.time_us)
    return Fitted(table, surface, version, len(rows), *times, kinds, timed.time_us)


def _shapes(rows: pd.DataFrame) -> int:
    return rows.groupby(["n", "k"]).ngroups


def _gemm_table(of: Published, dtype: formats.WeightDtype) -> Table | None:
    """The newest table that is large enough, and holds times of kernels rather than launches."""
    for rows, version in tables.gemms(of, dtype):
        if _shapes(rows) >= _FEWEST_SHAPES and rows["time_us"].quantile(0.01) <= _LAUNCH_US:
            return rows, version
    return None


def _as_timed(rows: pd.DataFrame) -> GemmLattice:
    return GemmLattice.from_arrays(fit_gemm("", rows, "").surface.arrays())


def _gemms_and_attention(of: Published, families: Collection[str]) -> Iterator[Fitted]:
    """GEMMs and attention: blocks of latent attention are taken without their GEMMs in bf16."""
    datasets, device, stack = of
    bf16, engine = None, formats.named_stack(stack)[0]
    for dtype in formats.WEIGHT_DTYPES:
        if (found := _gemm_table(of, dtype)) is None:
            continue
        rows, version = found
        if dtype == "fp8" and engine == "trtllm":
            rows = _without_quantisation(rows, tables.quantisation((datasets, device, engine)))
        if dtype == "bf16" and "attention" in families:
            bf16 = _as_timed(rows)  # so were the blocks
        if "gemm" in families:
            yield replace(
                fit_gemm(f"gemm.{dtype}", rows, version, rates_of(device, dtype, "balanced")),
                kernel=tables.gemm_kernel(of, dtype, version),
                unlike=tables.UNLIKE.get((engine, version, dtype), ""),
            )
    if "attention" in families:
        yield from attention_fits(of, bf16)
        yield from sparse_fits(of) if "@" not in stack else ()
        yield from recurrent_fits(of)


def _gemms_of_blocks(of: Published) -> dict[formats.WeightDtype, FastestGemm]:
    """By format: as they were timed, or those of other stacks that the stack chooses."""
    dtypes: tuple[formats.WeightDtype, ...] = ("bf16", "fp8_block")
    found: dict[formats.WeightDtype, FastestGemm] = {}
    for dtype in dtypes:
        if table := _gemm_table(of, dtype):
            beside = map(GemmLattice.from_arrays, gemms_beside(*of[1:], dtype).values())
            found[dtype] = FastestGemm([_as_timed(table[0]), *beside])
    return found


def _without_quantisation(rows: pd.DataFrame, quantisation: pd.DataFrame | None) -> pd.DataFrame:
    """fp8 GEMMs as a server with static scales runs them."""
    if quantisation is None:
        return rows
    joined = rows.merge(quantisation.rename(columns={"time_us": "quant_us"}), on=["m", "k"])
    left = np.maximum(joined["time_us"] - joined.pop("quant_us"), _LEAST_SHARE * joined["time_us"])
    return joined.assign(time_us=left)


#: The kernel's time for one token without context, as timed alone (10 to 13 us).
_FASTEST_US = 10.0
#: Sparse attention of one token without its GEMMs, in a CUDA graph: SGLang's takes 25 to 40.
_FASTEST_SPARSE_US = 30.0
#: The shipped models whose sparse attention was measured: their names in the public tables.
_SPARSE = {"deepseek-v3.2": "DeepseekV32ForCausalLM", "glm-5": "GlmMoeDsaForCausalLM"}
#: Of a block whose GEMMs take more, too little is left to be known.
_LEAST_BLOCK = 0.2
#: A law of sparse attention that is further off is not used.
_USELESS_PCT = 120.0
#: Any context of a recurrent step.
_ANY_CONTEXT = 131072
#: A table with fewer pairs of head counts is a stub.
_FEWEST_HEADS = 4
#: Head dimensions of plain attention, by sliding window (0: none); those with which published
#: models use a window.
_WINDOWS = {
    0: (64, 128, 256),
    128: (64,),
    1024: (128, 256),
    8192: (128,),
}


def fit_prompts(table: str, rows: pd.DataFrame, version: str, window: float = np.inf) -> Fitted:
    """The surface of prompts of one head dimension, whose queries see ``window`` keys."""
    return fitted(table, fit_prefill(rows), rows, version, holdout.prompt_kinds(rows, window))


def fit_together(table: str, rows: pd.DataFrame, version: str, window: float = np.inf) -> Fitted:
    """The shares of prompts in calls of several, from a table of one head dimension."""
    kinds = {"batches": holdout.together(rows, window)}
    return fitted(table, fit_added(rows), rows, version, kinds)


def fit_decodes(
    table: str,
    rows: pd.DataFrame,
    version: str,
    least_us: Array | float = 0.0,
    window: float = np.inf,
    scored: bool = True,
) -> Fitted:
    """The surface of decodes of one head dimension, which see ``window`` keys. ``least_us`` is the
    least time to read each decode's KV cache from HBM. Of two ways to other head counts the one
    with the smaller held-out error counts (the first if not ``scored``)."""
    published = microseconds(rows)
    rows = rows.assign(time_us=np.maximum(published, least_us))
    off = {way: [*holdout.decode_heads(rows, way, window)] for way in (False, True) if scored}
    p95 = {way: left.p95_pct for way in off if (left := holdout.summary(off[way]))}
    by_group = p95.get(True, np.inf) < p95.get(False, np.inf)
    grid = fit_decode(rows, by_group, window)
    kinds = holdout.decode_kinds(rows, window, by_group) | {"heads": iter(off.get(by_group, []))}
    pair = rows.groupby(["heads", "kv_heads"]).ngroup().to_numpy()  # in the order of the grid
    places = (
        np.searchsorted(sizes, rows[column])
        for sizes, column in zip(grid.sizes, ("batch", "context"), strict=True)
    )
    clean = np.exp(grid.log_us[(pair, *places)])
    return Fitted(table, grid, version, len(rows), published, clean, kinds)


def reading_us(
    rows: pd.DataFrame,
    numbers: pd.Series[int] | int,
    kv_dtype: formats.KvDtype,
    device: str,
    window: float = np.inf,
) -> Array:
    """The least time to read the KV cache of decodes: ``numbers`` a token, up to the window."""
    tokens = rows["batch"] * np.minimum(rows["context"] - 1, window)
    num_bytes = (formats.KV_BYTES[kv_dtype] * numbers * tokens).to_numpy(np.float64)
    return fastest_us(num_bytes, load_device(device).memory_bandwidth)


def attention_fits(of: Published, gemms: GemmLattice | None) -> Iterator[Fitted]:
    """Every table of plain and latent attention; ``gemms`` are the stack's in bf16."""
    _, device, stack = of
    scored = "@" not in stack
    for kv_dtype, kind in product(formats.KV_DTYPES, ("prefill", "decode")):
        read = tables.prefill if kind == "prefill" else tables.decode
        for window, head_dims in _WINDOWS.items():
            if (table := read(of, kv_dtype, window)) is None:
                continue
            for head_dim in head_dims:
                rows, version = table[0].query(f"head_dim == {head_dim}"), table[1]
                rows = rows.drop(columns="head_dim")
                if rows.groupby(["heads", "kv_heads"]).ngroups < _FEWEST_HEADS:
                    continue
                name = f"{kv_dtype}.{head_dim}" + (f"w{window}" if window else "")
                seen = window or np.inf
                if kind == "decode":
                    numbers = 2 * head_dim * rows["kv_heads"]
                    least = reading_us(rows, numbers, kv_dtype, device, seen)
                    yield fit_decodes(f"decode.{name}", rows, version, least, seen, scored)
                    continue
                alone = rows[rows["batch"] == 1]
                yield fit_prompts(f"prefill.{name}", alone, version, seen)
                if len(alone) < len(rows):
                    yield fit_together(f"added.{name}", rows, version, seen)
        if latent := latent_rows(of, kind, kv_dtype, gemms):
            name = f"{kind}.{kv_dtype}.{attention.LATENT}"
            if kind == "decode":
                least = reading_us(latent[0], attention.MEASURED_LATENT.cached, kv_dtype, device)
                yield fit_decodes(name, *latent, least, scored=scored)
            else:
                yield fit_prompts(name, *latent)


def latent_rows(
    of: Published, kind: str, kv_dtype: formats.KvDtype, gemms: GemmLattice | None
) -> Table | None:
    """Rows (heads, kv_heads, chunk or batch and context, time_us) and the stack's version; None
    where nothing usable is published. ``gemms`` are the stack's in bf16."""
    found = tables.latent(of, kind, kv_dtype)
    if found is None or found[0]["time_us"].quantile(0.01) > _LAUNCH_US:
        blocks = tables.latent(of, kind, kv_dtype, whole=True)
        single = tables.latent(of, "decode", kv_dtype, whole=True)
        if blocks is None or single is None or gemms is None:
            return None
        if not {*blocks[0]["heads"]} <= {*single[0]["heads"]}:
            return None
        found = _kernels_of(blocks[0], gemms, single=single[0]), f"{blocks[1]} {attention.LESS}"
    rows, version = found
    # Prompts have keys for every head; decodes read one vector for all.
    return rows.assign(kv_heads=rows["heads"] if kind == "prefill" else 1), version


def _kernels_of(
    blocks: pd.DataFrame,
    gemms: AnyGemm,
    model: str = "deepseek-v3",
    single: pd.DataFrame | None = None,
    fastest_us: float = _FASTEST_US,
) -> pd.DataFrame:
    """Blocks without their GEMMs, and without the launches: what the fastest decode (of ``single``)
    takes beyond ``fastest_us``."""
    rest, single = _rest(blocks, gemms, model), blocks if single is None else single
    least = _rest(single, gemms, model).groupby(single["heads"]).min()
    launches = (least - fastest_us).clip(lower=0.0).loc[blocks["heads"]].to_numpy()
    return blocks.assign(time_us=(rest - launches).clip(lower=_FASTEST_US))


def _rest(rows: pd.DataFrame, gemms: AnyGemm, model: str) -> pd.Series[float]:
    """The time of a shipped model's block without its GEMMs."""
    left, spec = rows["time_us"].copy(), load_model(model)
    tokens = "chunk" if "chunk" in rows else "batch"
    for heads, part in rows.groupby("heads"):
        m = part[tokens].to_numpy(np.float64)
        shapes = spec.gemms(spec.num_heads // int(str(heads)))
        for shape in (shapes[op] for op in ATTENTION_GEMMS if op in shapes):
            left.loc[part.index] -= gemms.time_us(m, shape.n, shape.k)
    return left


def sparse_fits(of: Published) -> Iterator[Fitted]:
    """Sparse attention by shipped model and format: its blocks without their GEMMs, which the same
    formats get back, and without launches."""
    gemms = _gemms_of_blocks(of)
    for kv_dtype, dtype, (model, name) in product(
        formats.KV_DTYPES, gemms, attention.SPARSE_TABLES.items()
    ):
        single = tables.sparse(of, "decode", kv_dtype, _SPARSE[model], dtype)
        blocks = tables.sparse(of, "prefill", kv_dtype, _SPARSE[model], dtype)
        if single is None or blocks is None:
            continue
        spec = load_model(model)
        assert spec.indexer is not None and spec.latent is not None
        table, seen = f"{kv_dtype}.{name}-{dtype}", float(spec.indexer.top_k)
        prompts, decodes = (
            kernels(rows[rows["heads"] <= spec.num_heads], gemms[dtype], model)
            for kernels, rows in ((sparse_prompts, blocks[0]), (sparse_decodes, single[0]))
        )
        law, kinds = fit_sparse(prompts, spec.indexer), holdout.sparse_kinds(prompts, spec.indexer)
        found = fitted(f"prefill.{table}", law, prompts, f"{blocks[1]} {attention.LESS}", kinds)
        if found.fit.left_out["heads"].half_width_pct > _USELESS_PCT:
            continue  # most rows are stalls of the host
        yield found
        least = reading_us(decodes, spec.latent.cached, kv_dtype, of[1], seen)
        yield fit_decodes(f"decode.{table}", decodes, f"{single[1]} {attention.LESS}", least, seen)


def sparse_prompts(rows: pd.DataFrame, gemms: AnyGemm, model: str) -> pd.DataFrame:
    """Prompts of a model's sparse attention, from its blocks.

    A block takes as long as its kernels or its launches, whichever takes longer: those of up to
    128 tokens are launches, and rows within 30 % of their median are left out. So are chunks of
    less than 256 tokens and contexts beyond 131,072, which other kernels serve.
    """
    launches = rows["time_us"][rows["chunk"] <= 128].median()
    known = (rows["time_us"] > 1.3 * launches) & (rows["chunk"] >= 256)
    rows = rows[known & (rows["context"] <= 131072)]
    rest = _rest(rows, gemms, model)
    left = rest > _LEAST_BLOCK * rows["time_us"]
    return rows.assign(time_us=rest)[left]


def sparse_decodes(rows: pd.DataFrame, gemms: AnyGemm, model: str) -> pd.DataFrame:
    """Decodes of a model's sparse attention, from its blocks."""
    return _kernels_of(rows, gemms, model, fastest_us=_FASTEST_SPARSE_US).assign(kv_heads=1)


def recurrent_fits(of: Published) -> Iterator[Fitted]:
    """Recurrent layers: prompts by chunk and batch, steps by batch. A scan works in chunks of
    :data:`STATE_CHUNK` tokens, as attention does in a window; a step reads one state."""
    prompts, steps = (tables.recurrent(of, kind) for kind in ("prefill", "decode"))
    if prompts is None or steps is None:
        return
    (rows, version), seen = prompts, float(attention.STATE_CHUNK)
    yield fit_prompts(f"prefill.{attention.STATE}", rows[rows["batch"] == 1], version, seen)
    yield fit_together(f"added.{attention.STATE}", rows, version, seen)
    rows, version = steps
    # A step takes as long at any context: a table needs two. It reads and writes states in float32.
    both = [rows.assign(context=context) for context in (1, _ANY_CONTEXT)]
    table = pd.concat(both, ignore_index=True).drop(columns="chunk")
    moved = (8.0 * attention.STATE_HEAD**2) * (table["batch"] * table["heads"]).to_numpy(np.float64)
    least = fastest_us(moved, load_device(of[1]).memory_bandwidth)
    yield fit_decodes(f"decode.{attention.STATE}", table, version, least, 1.0, "@" not in of[2])


#: By the name of a table: its rows and version, and the rates that bound the experts.
ExpertTables = Mapping[str, tuple[pd.DataFrame, str, Rates]]


def expert_tables(of: Published, dtype: formats.MoeDtype) -> ExpertTables:
    """The tables of one format, by distribution of tokens."""
    return {
        f"{MOE}.{dtype}.{spread}": (*table, rates_of(of[1], dtype, spread))
        for spread in formats.DISTRIBUTIONS
        if (table := tables.experts(of, dtype, spread))
    }


def fit_experts(format_tables: ExpertTables, wide: bool = False) -> Iterator[Fitted]:
    """The surfaces of one format's tables of experts (sizes, tokens, time_us).

    Token counts that are no knots are scored together over all tables: each has few. ``wide``:
    tables by ranks, each with tokens of its own; of one model alone all token counts are kept, and
    every other one is scored.
    """
    timed = {table: moe_table(rows, wide) for table, (rows, *_) in format_tables.items()}
    raws = {table: timed[table].from_memory(rates) for table, (*_, rates) in format_tables.items()}
    knots: dict[str, npt.NDArray[np.intp]] = {}
    between: list[Errors] = []
    for table, (*_, rates) in format_tables.items():
        # Half of the shapes choose the knots, the others are scored.
        raw, chosen = raws[table], np.arange(len(raws[table].shapes)) % 2 == 0
        knots[table] = choose_tokens(raw.cleaned(rates).some(chosen), rates)
        if wide and sum(1 for _ in groups(raw.shapes)) == 1:
            knots[table], chosen[:] = np.arange(len(raw.tokens)), False
        kept = knots[table] if chosen.any() else np.append(knots[table][:-1:2], knots[table][-1])
        between += holdout.moe_tokens(raw, rates, kept, np.flatnonzero(~chosen))
    for table, (rows, version, rates) in format_tables.items():
        raw = raws[table]
        clean = raw.cleaned(rates)
        kinds = {"between": iter(between)} | holdout.moe_kinds(raw, rates, wide)
        surface, times = fit_moe(clean, rates, knots[table]), (raw.time_us, clean.time_us)
        yield Fitted(
            table,
            surface,
            version,
            len(rows),
            *times,
            kinds,
            timed[table].time_us,
        )


#: A time of DeepEP's normal mode within this factor of the host's launches is no kernel's.
_LAUNCHES = 1.3
#: Formats in which tokens are dispatched; the other parts do not depend on it.
_SENT: tuple[formats.MoeDtype, ...] = ("nvfp4", "fp8", "bf16")


def fit_wide(of: Published) -> Iterator[Fitted]:
    """Every table of wide expert parallelism of a stack; over PCIe the gathers alone."""
    if load_device(of[1]).intra_node.kind.startswith("NVLink"):
        yield from _wide_experts(of)
        yield from _exchanges(of)
    for op in GATHERS:
        if table := tables.all_to_alls(of, op):
            rows, version = table
            for gpus, part in _by_gpus(rows).items():
                name, kinds = f"{WIDE}.{op}.{gpus}", {"sizes": holdout.messages(part)}
                yield fitted(name, fit_reduce(part), part, version, kinds)
    # Decodes of latent attention by ranks of data-parallel attention, from whole blocks.
    if found := tables.latent_blocks(of):
        rows = _kernels_of(found[0], _gemms_of_blocks(of)["fp8_block"]).assign(kv_heads=1)
        least = reading_us(rows, attention.MEASURED_LATENT.cached, "fp8", of[1])
        yield fit_decodes(attention.BLOCKS, rows, f"{found[1]} {attention.LESS}", least)


def _wide_experts(of: Published) -> Iterator[Fitted]:
    device = of[1]
    for dtype in formats.MOE_DTYPES:
        found, even = {}, rates_of(device, dtype, "balanced")
        for spread in formats.DISTRIBUTIONS:
            if table := tables.experts(of, dtype, spread, wide=True):
                found[f"{WIDE}.experts.{dtype}.{spread}"] = *table, rates_of(device, dtype, spread)
            if table := tables.even_experts(of, dtype, spread):
                found[f"{WIDE}.even.{dtype}.{spread}"] = *table, even
        yield from fit_experts(found, wide=True)
    for mode in MODES:
        found = {}
        for spread in formats.DISTRIBUTIONS:
            if table := tables.deepep_experts(of, mode, spread):
                rows, version = table
                if mode == "normal":
                    rows = rows[rows["time_us"] > _LAUNCHES * rows["time_us"].quantile(0.05)]
                rates = rates_of(device, "fp8_block", spread)
                found[f"{WIDE}.{mode}_experts.fp8_block.{spread}"] = rows, version, rates
        yield from fit_experts(found, wide=True)


def _exchanges(of: Published) -> Iterator[Fitted]:
    found = {
        f"{mode}{'.nodes' if between else ''}": tables.deepep(of, mode, between)
        for mode, between in product(MODES, (False, True))
    } | {
        f"{backend}.{part}.{sent}": tables.nvlink_exchange(of, backend, part, sent)
        for (backend, parts), sent in product(PARTS.items(), _SENT)
        for part in (parts if sent == _SENT[0] else ("dispatch",))
    }
    for name, table in found.items():
        if table is not None:
            curves = fit_exchange(table[0], each=name.startswith("low_latency"))
            yield fitted(f"{WIDE}.{name}", curves, *table, holdout.exchange_kinds(curves))


def without_launches(kernels: dict[str, Table], device: DeviceSpec) -> dict[str, Table]:
    """The eager kernel without the host's launches.

    An eager call copies the message to memory that the other ranks can read, then runs the kernel
    of the graph. The rest of its measured time is the host's, which in a server launches ahead (and
    is counted as ``launch_layer_s``). B200, SGLang: 20 us with 0.5.9 and 29 with 0.5.14, 64 on 4
    GPUs, for every message size; the graph's kernel takes 4 to 7.
    """
    if not {"graph", "eager"} <= set(kernels):
        return kernels
    eager, version = kernels["eager"]
    known = eager.merge(
        kernels["graph"][0],
        on=["gpus", "num_bytes"],
        suffixes=("", "_graph"),
    )
    bandwidth = HBM_SHARE * device.memory_bandwidth
    copied = known["time_us_graph"] + 2e6 * known["num_bytes"] / bandwidth
    rows = known.assign(time_us=np.minimum(known["time_us"], copied))[eager.columns]
    return {**kernels, "eager": (rows, version)}


def _messages(op: str, kernels: dict[str, Table]) -> Iterator[Fitted]:
    for kernel, (rows, version) in kernels.items():
        parts = _by_gpus(rows)
        # One number of ranks has too few sizes for an error.
        off = [errors for part in parts.values() for errors in holdout.messages(part)]
        for gpus, part in parts.items():
            yield _curve(f"{op}.{kernel}.{gpus}", part, version, iter(off))


def _by_gpus(rows: pd.DataFrame) -> dict[int, pd.DataFrame]:
    return {int(str(gpus)): part for gpus, part in rows.groupby("gpus")}


def _curve(table: str, rows: pd.DataFrame, version: str, off: Iterator[Errors]) -> Fitted:
    """Of a table by bytes."""
    time = microseconds(rows.sort_values("num_bytes"))
    curve, clean = fit_reduce(rows), rising(time, 0)
    return Fitted(table, curve, version, len(rows), time, clean, {"sizes": off})


def _perf_fits(datasets: Path, device: str) -> Iterator[Fitted]:
    """From a ``profiler/perf`` folder: the GEMMs of one model, attention with its head counts."""
    name, model = PERF[device]
    folder, spec = source_folder(datasets, name), load_model(model)
    here, version = perf.degree_folder(folder, 1), str(perf.perf_meta(folder)["vllm_version"])
    gemms = []
    for op, shape in spec.gemms(1).items():
        rows = perf.op_rows(
            here,
            op,
            {next(iter(perf.LAYERS[op])): 1},
        ).frame  # no sampler
        gemms.append(rows.rename(columns={"num_tokens": "m"}).assign(n=shape.n, k=shape.k))
    yield fit_gemm("gemm.bf16", pd.concat(gemms, ignore_index=True), version)
    for op in names(lambda op: op.rest and op.streams is not None):
        rows = perf.op_rows(here, op).frame
        size = (stream_bytes(op, spec.shard(1)) * rows["num_tokens"]).astype(int)
        sized = rows.assign(num_bytes=size)
        yield _curve(f"elementwise.{op}", sized, version, holdout.messages(sized))
    cells = perf.attention_cells(here)
    heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
    chunks = perf.alone(cells, {"prefill_chunk": "chunk", "kv_prefill": "context"}).assign(**heads)
    fresh = chunks[chunks["context"] == 0].drop(columns="context")
    kind = f"bf16.{spec.head_dim}"
    yield fit_prompts(f"prefill.{kind}", fresh, version)
    after, prompts = chunks[chunks["context"] > 0], fit_prefill(fresh)
    units = load_device(device).num_sms
    kinds = holdout.prefix_kinds(after, prompts, units)
    yield fitted(f"prefix.{kind}", fit_prefix(after, prompts, units), after, version, kinds)
    decodes = perf.alone(cells, {"n_decode": "batch", "kv_decode": "context"}).assign(**heads)
    # A table's context holds the new token.
    grown = decodes.assign(context=decodes["context"] + 1)
    yield fit_decodes(f"decode.{kind}", grown, version)
