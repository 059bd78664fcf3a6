"""From the public tables to a stack's surfaces: cleaning, fits, and errors.

Of latent attention some stacks publish the kernel alone. Of others there is the whole block of
attention: from it the GEMMs of the same stack are taken, and the launches that nothing hid when
single tokens were timed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.experiments.lab.sources import aiconfigurator as tables
from sarathi_sim.experiments.lab.sources import llmservingsim as perf
from sarathi_sim.experiments.lab.sources.measurements import source_folder
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.formats import (
    KV_BYTES,
    KV_DTYPES,
    STACKS,
    WEIGHT_DTYPES,
    KvDtype,
    WeightDtype,
    named_stack,
)
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
from sarathi_sim.profiler.kernels import left_out, sparse_law
from sarathi_sim.profiler.kernels.attention_grid import (
    HeadGrid,
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
from sarathi_sim.profiler.kernels.left_out import Errors, Fitted, record
from sarathi_sim.profiler.kernels.moe_surface import Rates, rates_of
from sarathi_sim.profiler.kernels.own_ops import OWN_OPS
from sarathi_sim.profiler.kernels.reduce_curves import fit_reduce, stream_bytes
from sarathi_sim.profiler.kernels.sparse_law import fit_sparse
from sarathi_sim.profiler.kernels.stack_attention import (
    BLOCKS,
    LATENT,
    LESS,
    MEASURED_LATENT,
    SPARSE_TABLES,
    STATE,
    STATE_CHUNK,
    STATE_HEAD,
)
from sarathi_sim.profiler.kernels.stack_file import (
    Arrays,
    KernelFit,
    StackSpec,
    family_of,
    gemms_beside,
    load_stack,
)
from sarathi_sim.profiler.kernels.wide_fit import fit_wide
from sarathi_sim.profiler.kernels.wide_times import WIDE
from sarathi_sim.profiler.physics.studies import AIC, LLMSERVINGSIM
from sarathi_sim.profiler.storage.strict import SpecError, did_you_mean

#: Families of tables that are fitted together.
FAMILIES = ("gemm", "attention", MOE, ALL_REDUCE, ALL_TO_ALL, "elementwise", WIDE)
#: Above this the fastest rows (first percentile) are launches of the host: not used.
_LAUNCH_US = 40.0
#: The kernel's time for one token without context, as timed alone (10 to 13 us).
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


def _rest(
    rows: pd.DataFrame, gemms: AnyGemm, tokens: str, model: str = "deepseek-v3"
) -> pd.Series[float]:
    """The time of a shipped model's block without its GEMMs."""
    left, spec = rows["time_us"].copy(), load_model(model)
    for heads, part in rows.groupby("heads"):
        m = part[tokens].to_numpy(np.float64)
        shapes = spec.gemms(spec.num_heads // int(str(heads)))
        for shape in (shapes[op] for op in ATTENTION_GEMMS if op in shapes):
            left.loc[part.index] -= gemms.time_us(m, shape.n, shape.k)
    return left


def sparse_fits(
    datasets: Path, device: str, stack: str, gemms: Gemms, scored: bool
) -> Iterator[Fitted]:
    """Sparse attention by shipped model and format: its blocks without their GEMMs, which the same
    formats get back, and without launches."""
    for kv_dtype, dtype, (model, name) in product(KV_DTYPES, gemms, SPARSE_TABLES.items()):
        of, spec = (datasets, device, stack), load_model(model)
        single = tables.sparse(*of, "decode", kv_dtype, _SPARSE[model], dtype)
        blocks = tables.sparse(*of, "prefill", kv_dtype, _SPARSE[model], dtype)
        if single is None or blocks is None:
            continue
        assert spec.indexer is not None and spec.latent is not None
        table, seen = f"{kv_dtype}.{name}-{dtype}", float(spec.indexer.top_k)
        rows, version = blocks
        rows = sparse_prompts(rows[rows["heads"] <= spec.num_heads], gemms[dtype], model)
        law = fit_sparse(rows, spec.indexer)
        time = rows["time_us"].to_numpy(np.float64)
        errors = {"sizes": "chunk", "heads": "heads"} if scored else {}
        kinds = {kind: sparse_law.left_out(rows, spec.indexer, by) for kind, by in errors.items()}
        fit = record(f"{version} {LESS}", len(rows), time, time, law.log_rate.size, kinds)
        if scored and fit.left_out["heads"].half_width_pct > _USELESS_PCT:
            continue  # most rows are stalls of the host
        yield Fitted(f"prefill.{table}", law, fit)
        rows, version = single
        rows = sparse_decodes(rows[rows["heads"] <= spec.num_heads], gemms[dtype], model)
        rate = load_device(device).memory_bandwidth
        least = reading_us(rows, spec.latent.cached, kv_dtype, rate, seen)
        yield fit_attention(
            "decode", f"decode.{table}", rows, f"{version} {LESS}", least, seen, scored
        )


def sparse_prompts(rows: pd.DataFrame, gemms: AnyGemm, model: str) -> pd.DataFrame:
    """Prompts of a model's sparse attention, from its blocks.

    A block takes as long as its kernels or its launches, whichever takes longer: those of up to
    128 tokens are launches, and rows within 30 % of their median are left out. So are chunks of
    less than 256 tokens and contexts beyond 131,072, which other kernels serve.
    """
    launches = rows["time_us"][rows["chunk"] <= 128].median()
    known = (rows["time_us"] > 1.3 * launches) & (rows["chunk"] >= 256)
    rows = rows[known & (rows["context"] <= 131072)]
    rest = _rest(rows, gemms, "chunk", model)
    left = rest > _LEAST_BLOCK * rows["time_us"]
    return rows.assign(time_us=rest)[left]


def sparse_decodes(rows: pd.DataFrame, gemms: AnyGemm, model: str) -> pd.DataFrame:
    """Decodes of a model's sparse attention, from its blocks; launches are what a single token
    takes beyond :data:`_FASTEST_SPARSE_US`."""
    rest = _rest(rows, gemms, "batch", model)
    launches = (rest.groupby(rows["heads"]).min() - _FASTEST_SPARSE_US).clip(lower=0.0)
    rest -= launches.loc[rows["heads"]].to_numpy()
    return rows.assign(kv_heads=1, time_us=rest.clip(lower=_FASTEST_US))


def block_fits(datasets: Path, device: str, stack: str) -> Iterator[Fitted]:
    """Decodes of latent attention by ranks of data-parallel attention, from whole blocks."""
    found = tables.latent_blocks(datasets, device, stack)
    if found is not None:
        gemms = dict(_gemm_lattices(datasets, device, stack))["fp8_block"]
        rest, version = _rest(found[0], gemms, "batch"), f"{found[1]} {LESS}"
        over = (rest.groupby(found[0]["heads"]).min() - _FASTEST_US).clip(lower=0.0)
        rest = (rest - over.loc[found[0]["heads"]].to_numpy()).clip(lower=_FASTEST_US)
        rows = found[0].assign(kv_heads=1, time_us=rest)
        rate = load_device(device).memory_bandwidth
        least = reading_us(rows, MEASURED_LATENT.cached, "fp8", rate)
        yield fit_attention("decode", BLOCKS, rows, version, least)


def recurrent_fits(datasets: Path, device: str, stack: str, scored: bool) -> Iterator[Fitted]:
    """Recurrent layers: prompts by chunk and batch, steps by batch. A scan works in chunks of
    :data:`STATE_CHUNK` tokens, as attention does in a window; a step reads one state."""
    prompts = tables.recurrent(datasets, device, stack, "prefill")
    steps = tables.recurrent(datasets, device, stack, "decode")
    if prompts is None or steps is None:
        return
    (rows, version), seen = prompts, float(STATE_CHUNK)
    alone = rows[rows["batch"] == 1]
    yield fit_attention("prefill", f"prefill.{STATE}", alone, version, 0.0, seen, scored)
    yield fit_together(f"added.{STATE}", rows, version, seen, scored)
    rows, version = steps
    # A step takes as long at any context: a table needs two. It reads and writes states in float32.
    both = [rows.assign(context=context) for context in (1, _ANY_CONTEXT)]
    table = pd.concat(both, ignore_index=True).drop(columns="chunk")
    moved = (8.0 * STATE_HEAD**2) * (table["batch"] * table["heads"]).to_numpy(np.float64)
    least = fastest_us(moved, load_device(device).memory_bandwidth)
    yield fit_attention("decode", f"decode.{STATE}", table, version, least, 1.0, scored)


AnyGemm = GemmLattice | FastestGemm
Gemms = Mapping[WeightDtype, AnyGemm]
#: The shipped models whose sparse attention was measured: their names in the public tables.
_SPARSE = {"deepseek-v3.2": "DeepseekV32ForCausalLM", "glm-5": "GlmMoeDsaForCausalLM"}
#: Of a block whose GEMMs take more, too little is left to be known.
_LEAST_BLOCK = 0.2
#: A law of sparse attention that is further off is not used.
_USELESS_PCT = 120.0
#: Sparse attention of one token without its GEMMs, in a CUDA graph: SGLang's takes 25 to 40.
_FASTEST_SPARSE_US = 30.0
#: Any context of a recurrent step.
_ANY_CONTEXT = 131072
#: Rows (gpus, num_bytes, time_us) and version by kernel.
MessageTables = dict[str, tuple[pd.DataFrame, str]]
#: A table with fewer pairs of head counts is a stub.
_FEWEST_HEADS = 4
#: Head dimensions of plain attention, by sliding window (0: none); those with which published
#: models use a window.
_WINDOWS = {0: (64, 128, 256), 128: (64,), 1024: (128, 256), 8192: (128,)}


def attention_fits(
    datasets: Path, device: str, stack: str, gemms: GemmLattice | None
) -> Iterator[Fitted]:
    """Every table of attention; ``gemms`` are the stack's in bf16."""
    rate, scored = load_device(device).memory_bandwidth, "@" not in stack
    for kv_dtype, kind in product(KV_DTYPES, ("prefill", "decode")):
        read = tables.prefill if kind == "prefill" else tables.decode
        for window, head_dims in _WINDOWS.items():
            attention = read(datasets, device, stack, kv_dtype, window)
            for head_dim in head_dims if attention else ():
                assert attention
                rows = attention[0].query(f"head_dim == {head_dim}").drop(columns="head_dim")
                if rows.groupby(["heads", "kv_heads"]).ngroups < _FEWEST_HEADS:
                    continue
                name = f"{kv_dtype}.{head_dim}" + (f"w{window}" if window else "")
                seen = window or np.inf
                if kind == "decode":
                    numbers = 2 * head_dim * rows["kv_heads"]
                    least = reading_us(rows, numbers, kv_dtype, rate, seen)
                    table = f"decode.{name}"
                    yield fit_attention(kind, table, rows, attention[1], least, seen, scored)
                    continue
                alone = rows[rows["batch"] == 1]
                table = f"prefill.{name}"
                yield fit_attention(kind, table, alone, attention[1], 0.0, seen, scored)
                if len(alone) < len(rows):
                    yield fit_together(f"added.{name}", rows, attention[1], seen, scored)
        latent = latent_rows(datasets, device, stack, kind, kv_dtype, gemms)
        if latent is not None:
            rows, version = latent
            reading: Array | float = 0.0
            if kind == "decode":
                reading = reading_us(rows, MEASURED_LATENT.cached, kv_dtype, rate)
            table = f"{kind}.{kv_dtype}.{LATENT}"
            yield fit_attention(kind, table, rows, version, reading, scored=scored)


def reading_us(
    rows: pd.DataFrame,
    numbers: pd.Series[int] | int,
    kv_dtype: KvDtype,
    bandwidth: float,
    window: float = np.inf,
) -> Array:
    """The least time to read the KV cache of decodes: ``numbers`` a token, up to the window."""
    tokens = rows["batch"] * np.minimum(rows["context"] - 1, window)
    num_bytes = KV_BYTES[kv_dtype] * numbers * tokens
    return fastest_us(num_bytes.to_numpy(np.float64), bandwidth)


def fit_attention(
    kind: str,
    table: str,
    rows: pd.DataFrame,
    version: str,
    least_us: Array | float = 0.0,
    window: float = np.inf,
    scored: bool = True,
) -> Fitted:
    """The surface of a table of prefill or decode attention of one head dimension.

    ``least_us`` is the least time to read each decode's KV cache from HBM; queries see ``window``
    keys. With ``scored`` it is scored on rows left out.
    """
    if kind == "prefill":
        grid = fit_prefill(rows)
        time = clean = rows["time_us"].to_numpy(np.float64)
        kinds = {
            "sizes": left_out.prefill_sizes(rows, window),
            "heads": left_out.prefill_heads(rows, window),
            "beyond": left_out.prefill_heads(rows, window, inside=False),
        }
    else:
        published = rows["time_us"].to_numpy(np.float64)
        rows = rows.assign(time_us=np.maximum(published, least_us))
        # Of two ways to other head counts, the one with the smaller held-out error.
        off = partial(left_out.decode_heads, window=window)
        ways = {way: [*off(rows, way)] if scored else [] for way in (False, True)}
        by_group = _p95(ways[True]) < _p95(ways[False])
        grid = fit_decode(rows, by_group, window)
        time, clean = published, _grid_times(grid, rows)
        kinds = {
            "sizes": left_out.decode_sizes(rows, window),
            "heads": iter(ways[by_group]),
            "beyond": left_out.decode_heads(rows, by_group, window, inside=False),
        }
    kinds = kinds if scored else {}
    fit = record(version, len(rows), time, clean, grid.log_us.size, kinds)
    return Fitted(table, grid, fit)


def fit_together(
    table: str, rows: pd.DataFrame, version: str, window: float = np.inf, scored: bool = True
) -> Fitted:
    """The shares of prompts in calls of several, from a table of one head dimension."""
    grid, time = fit_added(rows), rows["time_us"].to_numpy(np.float64)
    kinds = {"batches": left_out.together(rows, window)} if scored else {}
    return Fitted(table, grid, record(version, len(rows), time, time, grid.log_us.size, kinds))


def _p95(errors: list[Errors]) -> float:
    found = left_out.summary(errors)
    return found.p95_pct if found is not None else np.inf


def _grid_times(grid: HeadGrid, rows: pd.DataFrame) -> Array:
    known = {tuple(pair): at for at, pair in enumerate(grid.heads.tolist())}
    pairs = zip(rows["heads"].tolist(), rows["kv_heads"].tolist(), strict=True)
    at = [known[pair] for pair in pairs]
    batches, contexts = grid.sizes
    places = np.searchsorted(batches, rows["batch"]), np.searchsorted(contexts, rows["context"])
    return np.asarray(np.exp(grid.log_us[(np.array(at), *places)]))


#: Devices of LLMServingSim's profiles: the folder, and the model that ran on one GPU.
PERF = {"rtx-4090": ("llmservingsim_rtx4090", "llama-3.1-8b")}
#: A table with fewer shapes is a stub.
_FEWEST_SHAPES = 100
#: Least share of a GEMM's time that is left when its dynamic quantisation is subtracted.
_LEAST_SHARE = 0.25
#: Without a table of quantisation: the value on which vLLM's and SGLang's tables agree elsewhere.
_ASSUMED_FLOOR_US = 2.1


def fitted_devices(stack: str) -> list[str]:
    """The devices with published kernels of a stack."""
    return [*tables.SYSTEMS, *(PERF if stack == "vllm" else ())]


def check_fitted(device: str | None, stack: str) -> list[str]:
    """The devices to fit: one, or all whose kernels are published.

    Raises SpecError for a device or a stack that is not among the tables.
    """
    stack = stack.partition("@")[0]
    devices = fitted_devices(stack)
    for what, name, known in (("device", device, devices), ("stack", stack, STACKS)):
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
    progress: Callable[[str], None] | None = None,
    date: str | None = None,
    families: Collection[str] = FAMILIES,
) -> tuple[StackSpec, Arrays]:
    """Every surface of one stack on one device; deterministic but for ``date`` (default today).

    Tables of other families than :data:`FAMILIES` named stay as they are shipped.
    Raises FileNotFoundError for a missing folder, BundleError for a table that cannot be used.
    """
    fits: dict[str, KernelFit] = {}
    arrays: dict[str, npt.NDArray[Any]] = {}
    order: Mapping[str, KernelFit] = {}
    engine, version = named_stack(stack)
    if set(families) != set(FAMILIES) and not version:
        spec, kept = load_stack(device, stack)
        order = spec.kernels
        fits = {table: fit for table, fit in order.items() if family_of(table) not in families}
        arrays = {name: kept[name] for name in kept if family_of(name) not in families}
    shipped = load_stack(device, engine)[0].kernels if version else {}
    for found in _fits(datasets, device, stack, families):
        if version and (
            found.table not in shipped or found.fit.version == shipped[found.table].version
        ):
            continue
        if progress is not None:
            progress(f"{device} {stack}: {found.table} ({found.fit.rows} rows)")
        fits[found.table] = found.fit
        stored = found.surface.arrays()
        arrays.update({f"{found.table}.{name}": array for name, array in stored.items()})
    fits = {table: fits[table] for table in dict.fromkeys((*order, *fits)) if table in fits}
    floor, source = _floor(datasets, device, engine)
    today = date or datetime.now(UTC).date().isoformat()
    origin = LLMSERVINGSIM if device in PERF else AIC
    about = (device, stack, origin.repository, origin.licence)
    return StackSpec(*about, today, floor, source, fits), arrays


def _fits(datasets: Path, device: str, stack: str, families: Collection[str]) -> Iterator[Fitted]:
    if device in PERF:
        found = _perf_fits(datasets, device)
        yield from (one for one in found if family_of(one.table) in families)
        return
    if {"gemm", "attention"} & set(families):
        yield from _gemms_and_attention(datasets, device, stack, families)
    for op, own in OWN_OPS.items():
        yield from own.fits(datasets, device, stack) if op in families else ()
    if ALL_REDUCE in families:
        reduces = tables.all_reduces(datasets, device, stack)
        yield from _messages(ALL_REDUCE, without_launches(reduces, load_device(device)))
    found_all = tables.all_to_alls(datasets, device) if ALL_TO_ALL in families else None
    if found_all is not None and "@" not in stack:
        yield from _messages(ALL_TO_ALL, {"nccl": found_all})
    if WIDE in families and "@" not in stack:
        yield from fit_wide(datasets, device, stack)
        yield from block_fits(datasets, device, stack)


def _gemms_and_attention(
    datasets: Path, device: str, stack: str, families: Collection[str]
) -> Iterator[Fitted]:
    """GEMMs and attention: blocks of latent attention are taken without their GEMMs in bf16."""
    gemms: GemmLattice | None = None
    for dtype in WEIGHT_DTYPES:
        found = filter(_is_whole, tables.gemms(datasets, device, stack, dtype))
        for rows, version in islice(found, 1):
            engine = named_stack(stack)[0]
            if dtype == "fp8" and engine == "trtllm":
                rows = _without_quantisation(rows, tables.quantisation(datasets, device, engine))
            table = f"gemm.{dtype}"
            if dtype == "bf16" and "attention" in families:  # as timed: so were the blocks
                gemms = GemmLattice.from_arrays(fit_gemm(table, rows, version).surface.arrays())
            if "gemm" in families:
                rates, scored = rates_of(device, dtype, "balanced"), "@" not in stack
                fitted = fit_gemm(table, rows, version, rates, scored)
                kernel = tables.gemm_kernel(datasets, device, stack, dtype, version)
                unlike = tables.UNLIKE.get((engine, version, dtype), "")
                yield replace(fitted, fit=replace(fitted.fit, kernel=kernel, unlike=unlike))
    if "attention" in families:
        yield from attention_fits(datasets, device, stack, gemms)
        scored = "@" not in stack
        formats = dict(_gemm_lattices(datasets, device, stack)) if scored else {}
        yield from sparse_fits(datasets, device, stack, formats, scored) if scored else ()
        yield from recurrent_fits(datasets, device, stack, scored)


def _gemm_lattices(
    datasets: Path, device: str, stack: str
) -> Iterator[tuple[WeightDtype, FastestGemm]]:
    """The GEMMs of a stack's blocks by format: as they were timed, or those of other stacks that it
    chooses."""
    for dtype in ("bf16", "fp8_block"):
        found = filter(_is_whole, tables.gemms(datasets, device, stack, dtype))
        for rows, version in islice(found, 1):
            fitted = fit_gemm(f"gemm.{dtype}", rows, version, scored=False).surface.arrays()
            every = [fitted, *gemms_beside(device, stack, dtype).values()]
            yield dtype, FastestGemm([GemmLattice.from_arrays(arrays) for arrays in every])


def _perf_fits(datasets: Path, device: str) -> Iterator[Fitted]:
    """From a ``profiler/perf`` folder: the GEMMs of one model, attention with its head counts."""
    name, model = PERF[device]
    folder, spec = source_folder(datasets, name), load_model(model)
    here, version = perf.degree_folder(folder, 1), str(perf.perf_meta(folder)["vllm_version"])
    gemms = []
    for op, shape in spec.gemms(1).items():
        rows, _ = perf.op_rows(here, op, {next(iter(perf.LAYERS[op])): 1})  # no sampler
        gemms.append(rows.rename(columns={"num_tokens": "m"}).assign(n=shape.n, k=shape.k))
    yield fit_gemm("gemm.bf16", pd.concat(gemms, ignore_index=True), version)
    for op in names(lambda op: op.rest and op.streams is not None):
        rows, _ = perf.op_rows(here, op)
        size = (stream_bytes(op, spec.shard(1)) * rows["num_tokens"]).astype(int)
        sized = rows.assign(num_bytes=size)
        yield _fit_curve(f"elementwise.{op}", sized, version, left_out.messages(sized))
    cells = perf.attention_cells(here)
    heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
    chunks = perf.alone(cells, {"prefill_chunk": "chunk", "kv_prefill": "context"}).assign(**heads)
    fresh = chunks[chunks["context"] == 0].drop(columns="context")
    kind = f"bf16.{spec.head_dim}"
    yield fit_attention("prefill", f"prefill.{kind}", fresh, version)
    after, prompts = chunks[chunks["context"] > 0], fit_prefill(fresh)
    units = load_device(device).num_sms
    prefix = fit_prefix(after, prompts, units)
    kinds = {"sizes": left_out.prefix_sizes(after, prompts, units)}
    time = after["time_us"].to_numpy(np.float64)
    fit = record(version, len(after), time, time, prefix.log_us.size, kinds)
    yield Fitted(f"prefix.{kind}", prefix, fit)
    decodes = perf.alone(cells, {"n_decode": "batch", "kv_decode": "context"}).assign(**heads)
    # A table's context holds the new token.
    grown = decodes.assign(context=decodes["context"] + 1)
    yield fit_attention("decode", f"decode.{kind}", grown, version)


def without_launches(kernels: MessageTables, device: DeviceSpec) -> MessageTables:
    """The eager kernel without the host's launches.

    An eager call copies the message to memory that the other ranks can read, then runs the kernel
    of the graph. The rest of its measured time is the host's, which in a server launches ahead (and
    is counted as ``launch_layer_s``). B200, SGLang: 20 us with 0.5.9 and 29 with 0.5.14, 64 on 4
    GPUs, for every message size; the graph's kernel takes 4 to 7.
    """
    if not {"graph", "eager"} <= set(kernels):
        return kernels
    eager, version = kernels["eager"]
    known = eager.merge(kernels["graph"][0], on=["gpus", "num_bytes"], suffixes=("", "_graph"))
    copied = known["time_us_graph"] + 2e6 * known["num_bytes"] / (
        HBM_SHARE * device.memory_bandwidth
    )
    rows = known.assign(time_us=np.minimum(known["time_us"], copied))[eager.columns]
    return {**kernels, "eager": (rows, version)}


def _messages(op: str, kernels: MessageTables) -> Iterator[Fitted]:
    for kernel, (rows, version) in kernels.items():
        parts = {int(gpus): rows[rows["gpus"] == gpus] for gpus in np.unique(rows["gpus"])}
        # One number of ranks has too few sizes for an error.
        off = [errors for part in parts.values() for errors in left_out.messages(part)]
        for gpus, part in parts.items():
            yield _fit_curve(f"{op}.{kernel}.{gpus}", part, version, iter(off))


def _fit_curve(table: str, rows: pd.DataFrame, version: str, off: Iterator[Errors]) -> Fitted:
    """The curve of a table by bytes."""
    time = rows.sort_values("num_bytes")["time_us"].to_numpy(np.float64)
    fit = record(version, len(rows), time, rising(time, 0), len(rows), {"sizes": off})
    return Fitted(table, fit_reduce(rows), fit)


def _is_whole(table: tuple[pd.DataFrame, str]) -> bool:
    """Whether a table is large enough, and holds times of kernels rather than of launches."""
    rows = table[0]
    fastest = float(rows["time_us"].quantile(0.01))
    return rows.groupby(["n", "k"]).ngroups >= _FEWEST_SHAPES and fastest <= _LAUNCH_US


def fit_gemm(
    table: str,
    rows: pd.DataFrame,
    version: str,
    rates: Rates | None = None,
    scored: bool = True,
) -> Fitted:
    """The surface of a table of GEMMs (m, n, k, time_us); ``rates`` are the device's, given if
    weights in L2 are to be ruled out."""
    raw = timed = gemm_cube(rows)
    if rates is not None:
        weight_us = 1e6 * rates.weight_bytes / rates.bandwidth
        raw = timed.from_memory(weight_us, 1e6 * rates.cache / rates.bandwidth)
    clean = raw.cleaned()
    # Half of the widths choose the knots, the others are scored.
    half = clean.some(np.arange(0, len(clean.n), 2), np.arange(len(clean.k)), range(len(clean.m)))
    knots = choose_knots(lambda kept: np.log(through(half, kept) / half.time_us), len(half.m))
    surface = fit_lattice(clean, knots)
    others = np.arange(1, len(clean.n), 2)
    few = rows.groupby(["n", "k"]).ngroups < _FEWEST_SHAPES
    kinds = {
        "between": left_out.gemm_token_counts(clean, raw, knots, others),
        "token pairs": left_out.gemm_pairs(clean, raw),
        "shapes": left_out.gemm_each_shape(rows) if few else left_out.gemm_shapes(clean, raw),
        "beyond": left_out.gemm_beyond(clean, raw),
    }
    numbers, kinds = surface.log_rate.size, kinds if scored else {}
    fit = record(version, len(rows), raw.time_us, clean.time_us, numbers, kinds, timed.time_us)
    return Fitted(table, surface, fit)


def _without_quantisation(rows: pd.DataFrame, quantisation: pd.DataFrame | None) -> pd.DataFrame:
    """fp8 GEMMs as a server with static scales runs them."""
    if quantisation is None:
        return rows
    joined = rows.merge(quantisation.rename(columns={"time_us": "quant_us"}), on=["m", "k"])
    left = np.maximum(joined["time_us"] - joined["quant_us"], _LEAST_SHARE * joined["time_us"])
    return joined.assign(time_us=left).drop(columns="quant_us")


def _floor(datasets: Path, device: str, stack: str) -> tuple[float, str]:
    """The least time of an elementwise kernel: the fastest of the quantisation of one token."""
    if device in PERF:
        here = perf.degree_folder(source_folder(datasets, PERF[device][0]), 1)
        ones = [perf.op_rows(here, OTHERS, {layer: 1})[0] for layer in perf.LAYERS[OTHERS]]
        floor = float(np.median([rows["time_us"].iloc[0] for rows in ones]))
        return round(floor, 2), "measured: norm, activation and rotary of one token"
    # SGLang's table holds dynamic quantisation only, which is two kernels and more.
    rows = tables.static_quantisation(datasets, device, "vllm" if stack == "sglang" else stack)
    if rows is None:
        return _ASSUMED_FLOOR_US, "assumed: as on other devices"
    one = rows[(rows["m"] == 1) & (rows["k"] <= 8192)]["time_us"]
    return round(float(one.median()), 2), "measured: static fp8 quantisation of one token"
