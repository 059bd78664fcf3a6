"""Physics forms of op times: pure numpy, in microseconds, with a handful of constants each.

Inputs are columns (1-D arrays of equal length), among them the hardware's ``peak_flops``,
``bandwidth`` (bytes/s) and ``num_sms``, so that one form serves every device and rows of two
devices can be fitted together. The soft maximum ``(a^p + b^p)^(1/p)`` of compute and memory time,
rather than a hard one, is what measurements show near the ridge.

The FLOPs and bytes of an op are defined here once, for both kinds of regression: device models, and
the curves through a bundle's points (``simulator/op_times``). Their conversion into time is one
formula for GEMMs, :func:`gemm_time_us`. For attention there are two. A device model knows heads,
SMs and rates, and its constants serve all shapes: a soft maximum of compute, memory and the walk
over the keys. A bundle holds one shape on an unknown device, in a hundred points; its times are a
non-negative sum of terms (``regression.py``), whose few coefficients such points determine. The two
are not interchangeable: they give different times.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Columns = Mapping[str, Array]
Constants = Mapping[str, float]
Size = Array | float

#: Output tiles (rows, columns) that a GEMM fit chooses from.
GEMM_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128))
HALF = 2.0  # bytes of an fp16 or bf16 number
KEY_BLOCK = 64.0  # keys: half a block, which a row of queries computes beyond its own
HBM_SHARE = 0.8  # the share of its bandwidth that HBM reaches in a long read


def soft_max(p: float, *times: Array) -> Array:
    """``(sum of times^p)^(1/p)``, scaled by the largest against overflow."""
    stacked = np.stack(np.broadcast_arrays(*times))
    top = np.maximum(stacked.max(axis=0), 1e-12)
    total: Array = top * ((stacked / top) ** p).sum(axis=0) ** (1.0 / p)
    return total


def wave_fill(blocks: Array, sms: Array) -> Array:
    """The fraction of SM slots at work when ``blocks`` run in whole waves over ``sms``."""
    fill: Array = blocks / (np.ceil(blocks / sms) * sms)
    return fill


def split_fill(blocks: Array, sms: Array, most: Array) -> Array:
    """:func:`wave_fill` where a kernel with too few blocks splits each one in up to ``most`` parts.
    Blocks that nearly fill the SMs (80 %) are left alone, as flash-decoding kernels do."""
    parts = np.clip(
        np.floor(sms / blocks),
        1.0,
        np.maximum(most, 1.0),
    )
    parts = np.where(blocks >= 0.8 * sms, 1.0, parts)
    return np.minimum(wave_fill(blocks * parts, sms), 1.0)


def gemm_time_us(
    m: Array,
    n: Size,
    k: Size,
    constants: Constants,
    flop_rate: Size,
    number_rate: Size,
    stretch: Size = 1.0,
    us: float = 1.0,
) -> Array:
    """``out[m, n] = a[m, k] x b[k, n]``: overhead, and the soft maximum of compute and memory.

    The rows are rounded up to ``tile_m``; the share ``tile_share`` of this padding is paid, because
    libraries choose among several tiles. ``stretch`` is a further factor on the computation. Rates
    are FLOPs, and numbers read and written, in a unit of time of ``us`` microseconds.
    """
    tile = constants["tile_m"]
    rows = m + constants["tile_share"] * (np.ceil(m / tile) * tile - m)
    compute = us * (2 * rows * n * k) * stretch / flop_rate
    memory = us * (n * k + m * k + m * n) / number_rate
    return constants["overhead_us"] + soft_max(constants["p"], compute, memory)


def gemm_us(c: Columns, k: Constants) -> Array:
    """``m x n x k`` GEMM on a known device: :func:`gemm_time_us`, in whole waves of output tiles.
    ``wave_share`` is the share of the last wave's idle time that is paid."""
    m, n, sms = c["m"], c["n"], c["num_sms"]
    blocks = np.ceil(m / k["tile_m"]) * np.ceil(n / k["tile_n"])
    # With fewer blocks than SMs the library splits along k instead of leaving SMs idle.
    stretch = np.where(blocks >= sms, 1.0 / wave_fill(blocks, sms), 1.0)
    stretch = 1.0 + k["wave_share"] * (stretch - 1.0)
    flop_rate, number_rate = c["peak_flops"] * k["compute"], c["bandwidth"] * k["memory"] / HALF
    return gemm_time_us(m, n, c["k"], k, flop_rate, number_rate, stretch, us=1e6)


def attended(
    chunk: Array, context: Array, square: float = 0.5, edge: float = 0.5
) -> tuple[Array, Array]:
    """Keys that a chunk after ``context`` cached tokens reads, and the query-key pairs it computes.
    Under the causal mask those are half of the chunk's own square and of its diagonal; kernels
    compute another share of the ``square``, and more at its ``edge``."""
    return context + chunk, chunk * (context + square * chunk + edge)


def attended_within(chunk: Array, context: Array, window: float, edge: float = 0.5) -> Array:
    """The query-key pairs of :func:`attended` where a query sees the last ``window`` keys only."""
    free = np.clip(window - context, 0, chunk)  # queries that the window does not reach
    pairs = free * (context + free / 2 + 0.5) + (chunk - free) * window
    return np.asarray(pairs + (edge - 0.5) * chunk)


def decode_terms(batch: Array, context: Array) -> Array:
    """What a decode's attention takes time for, a column each: launch; sequences; one sequence's
    KV (a serial loop over it); the whole batch's KV."""
    return np.stack(
        [
            np.ones_like(batch),
            batch,
            context,
            batch * context,
        ],
        axis=-1,
    )


def attn_prefill_us(c: Columns, k: Constants) -> Array:
    """Causal attention of ``batch`` chunks of ``chunk`` tokens, each after ``context`` cached ones.
    ``causal`` is the share of the chunk's own square that the kernel computes (0.5: it skips all
    masked blocks; 1: none). ``token_us`` is the serial walk of one block over the keys."""
    chunk, context, heads = c["chunk"], c["context"], c["heads"]
    sms, dim = c["num_sms"], c["head_dim"]
    keys, pairs = attended(chunk, context, k["causal"], KEY_BLOCK)
    blocks = c["batch"] * heads * np.ceil(chunk / k["tile_m"])
    ideal = np.minimum(blocks / sms, 1.0)
    fill = ideal + k["wave_share"] * (wave_fill(blocks, sms) - ideal)
    compute = 4e6 * dim * heads * c["batch"] * pairs / (c["peak_flops"] * k["compute"] * fill)
    traffic = 2 * HALF * dim * c["batch"] * (c["kv_heads"] * keys + heads * chunk)
    memory = 1e6 * traffic / (c["bandwidth"] * k["memory"])
    return k["overhead_us"] + soft_max(k["p"], compute, memory, k["token_us"] * keys)


def attn_context_us(c: Columns, k: Constants) -> Array:
    """Attention of one chunk after ``context`` cached tokens, given ``base_us`` without them. It
    adds the time of ``chunk x context`` score pairs, a share of which suffers from SMs left idle by
    the last wave of blocks, and ``step_us`` for reading a paged cache at all."""
    work = 4e6 * c["head_dim"] * c["heads"] * c["chunk"] * c["context"]
    blocks = c["heads"] * np.ceil(c["chunk"] / k["tile_m"])
    fill = split_fill(blocks, c["num_sms"], c["context"] / 128.0)
    stretch = 1.0 + k["wave_share"] * (1.0 / fill - 1.0)
    compute = work * stretch / (c["peak_flops"] * k["compute"])
    traffic = 2 * HALF * c["head_dim"] * c["kv_heads"] * c["context"]
    memory = 1e6 * traffic / (c["bandwidth"] * HBM_SHARE)
    return c["base_us"] + k["step_us"] + np.maximum(compute, memory)


def attn_decode_us(c: Columns, k: Constants) -> Array:
    """Attention of one new token for each of ``batch`` sequences with ``context`` tokens.

    One block a (sequence, head) walks its keys in ``token_us`` each after ``block_us``; blocks run
    in waves over the SMs, and kernels that split the keys use idle SMs. ``packed`` kernels walk a
    KV head once for its whole group of query heads. HBM gives at most ``hbm`` of its bandwidth.
    """
    dim, sms, context = c["head_dim"], c["num_sms"], c["context"]
    kv_units = c["batch"] * c["kv_heads"]
    units = kv_units if k["packed"] else c["batch"] * c["heads"]
    most = np.maximum(np.ceil(context / 256.0), 1.0) if k["splits"] else np.ones_like(dim)
    parts = np.clip(np.floor(sms / units), 1.0, most)
    blocks = units * parts / sms
    waves = k["wave_share"] * np.ceil(blocks) + (1 - k["wave_share"]) * np.maximum(blocks, 1.0)
    walk = waves * (k["block_us"] + k["token_us"] * context / parts)
    traffic = 2 * HALF * dim * kv_units * context
    return k["overhead_us"] + soft_max(
        k["p"],
        walk,
        1e6 * traffic / (c["bandwidth"] * k["hbm"]),
    )


def stream_us(c: Columns, k: Constants) -> Array:
    """An op bound by memory traffic: ``num_bytes`` read and written, above a floor."""
    moved = 1e6 * c["num_bytes"] / (c["bandwidth"] * k["memory"])
    return soft_max(k["p"], np.full_like(moved, k["overhead_us"]), moved)


def link_us(c: Columns, k: Constants) -> Array:
    """A message of ``num_bytes``: latency, a square-root ramp, and bandwidth."""
    megabytes = c["num_bytes"] / 1e6
    return k["overhead_us"] + megabytes * k["us_per_mb"] + k["ramp_us"] * np.sqrt(megabytes)
