"""The quantities that the paper states, each a function of a machine.

``data/paper/claims.yaml`` names the function and its arguments for every claim; the machine is
that of the claim's model, device and tensor parallelism. Times are in the units of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from statistics import median
from typing import Any, Literal

from sarathi_sim.policies.orca import Orca, OrcaWorstCase, RequestLevel
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.sarathi import ChunkRule, Sarathi
from sarathi_sim.profiler.facts.ops import GEMMS
from sarathi_sim.simulator.load.engine_memory import kv_capacity_tokens, max_batch, stage_layers
from ...run.machine import Machine, Throughput
from .gpt3 import outcome
from .variants import TILE

LENGTH = 1024
MAX_BATCH = {1024: 18, 2048: 10, 3072: 6}
"""The most requests the paper fits, by sequence length."""

Extreme = Literal["least", "largest"]
_EXTREMES: dict[Extreme, Callable[[Iterable[float]], float]] = {"least": min, "largest": max}


Part = Literal["linear", "attention", "total"]
Phase = Literal["prefill", "decode"]


def iteration_ms(
    m: Machine, part: Part = "total", prompt: int = 0, decodes: int = 0, context: int = 0
) -> float:
    """Milliseconds of an iteration of a prompt, of decodes, or of both; or of a part of it."""
    iteration = m.iteration([(prompt, 0)] if prompt else [], decodes, context)
    return 1e3 * float(getattr(iteration, f"{part}_s"))


def iteration_growth(m: Machine, before: int, after: int) -> float:
    """Percent that an iteration of ``after`` prompt tokens takes longer than one of ``before``."""
    return 100 * (iteration_ms(m, prompt=after) / iteration_ms(m, prompt=before) - 1)


def token_ms(m: Machine, prompt: int = 0, decodes: int = 0) -> float:
    """Milliseconds a token of a prompt alone, or a decode in a batch of decodes alone."""
    return iteration_ms(m, "total", prompt, decodes, LENGTH) / (prompt or decodes)


def piggybacked_token_ms(m: Machine, prompt: int, decodes: int) -> float:
    """Milliseconds that a decode adds to an iteration with otherwise only prompt rows."""
    mixed = iteration_ms(m, prompt=prompt, decodes=decodes, context=LENGTH)
    return (mixed - iteration_ms(m, prompt=prompt + decodes)) / decodes


def piggybacked_decode_gain(m: Machine, batch: int, prompt: int, decodes: int) -> float:
    """Time of a decode in a batch of decodes / time that a piggybacked decode adds to a prompt."""
    return token_ms(m, decodes=batch) / piggybacked_token_ms(m, prompt, decodes)


def decode_cost(m: Machine, batch: int) -> float:
    """Cost of a decoded token / cost of a prompt token, at one batch size."""
    decode = m.iteration(decodes=batch, context=LENGTH).total_s / batch
    return decode * LENGTH * batch / m.prefill(LENGTH, prompts=batch).total_s


def others_share(m: Machine) -> float:
    """Percent of one layer's prefill of 1024 tokens that is spent in elementwise ops."""
    block = m.block(LENGTH)
    return 100 * block["others"] / (sum(block.values()) + m.attention(LENGTH) / m.layers)


def op_token_ms(m: Machine, op: str, phase: Phase, batch: int) -> float:
    """Milliseconds a token in one op of all layers; prompts or contexts of 1024."""
    rows = LENGTH * batch if phase == "prefill" else batch
    if op != "attention":
        return 1e3 * m.layers * m.block(rows)[op] / rows
    prefill = batch * m.attention(LENGTH) if phase == "prefill" else 0.0
    return 1e3 * (prefill or m.decode_attention(batch, LENGTH)) / rows


def prefill_rate(m: Machine, length: int, batch: int = 1) -> float:
    """Tokens a millisecond of one layer's prefill."""
    one = sum(m.block(length * batch).values())
    return 1e-3 * (length * batch / (one + batch * m.attention(length) / m.layers))


def decode_rate(m: Machine, length: int, batch: int) -> float:
    """Tokens a millisecond of one layer's decodes."""
    one = sum(m.block(batch).values())
    return 1e-3 * (batch / (one + m.decode_attention(batch, length) / m.layers))


def prefill_peak(m: Machine) -> float:
    """Tokens a millisecond, the best of a single layer at 512 to 4096 tokens."""
    return max(prefill_rate(m, *size) for size in ((512, 1), (1024, 1), (1024, 2), (1024, 4)))


def prefill_loss(m: Machine, tokens: int) -> float:
    """Percent of the peak rate that one layer's prefill of ``tokens`` misses."""
    return 100 * (1 - prefill_rate(m, tokens) / prefill_peak(m))


def prefill_share(m: Machine, tokens: int) -> float:
    """Percent of the peak rate that one layer's prefill of ``tokens`` reaches."""
    return 100 - prefill_loss(m, tokens)


def decode_scaling(m: Machine, batch: int) -> float:
    """Decode throughput at ``batch`` / at batch 1, of the whole model."""
    return token_ms(m, decodes=1) / token_ms(m, decodes=batch)


def saturation(rate: Callable[[int], float], sizes: Sequence[int]) -> float:
    """The first of ``sizes`` (each twice the one before) after which the rate gains under 5 %."""
    return next((size for size in sizes if rate(2 * size) < 1.05 * rate(size)), 2 * sizes[-1])


def saturated(m: Machine, phase: Phase) -> float:
    """Prompt or batch from which doubling it gains less than 5 % of one layer's rate."""
    if phase == "prefill":
        return saturation(lambda tokens: prefill_rate(m, tokens), (64, 128, 256, 512, 1024, 2048))
    return saturation(lambda batch: decode_rate(m, LENGTH, batch), (16, 32, 64, 128, 256, 512))


def intensity(m: Machine, op: str, new: int, batch: int) -> float:
    """FLOPs a byte of a GEMM (fp16, each tensor moved once) or of attention, for ``new`` tokens of
    each sequence of a batch."""
    if (shape := m.ops.model.gemms(1).get(op)) is None:
        return attention_intensity(m, new)
    rows = batch * new
    moved = 2 * (rows * shape.k + shape.k * shape.n + rows * shape.n)
    return 2 * rows * shape.k * shape.n / moved


def attention_intensity(m: Machine, new: int) -> float:
    """FLOPs a byte of the attention of ``new`` tokens: one decode, or a whole prompt of 1024."""
    spec = m.ops.model
    pairs = float(LENGTH) if new == 1 else new * (new + 1) / 2
    tensors = 2 * (2 * spec.num_heads * new + 2 * spec.num_kv_heads * LENGTH) * spec.head_dim
    return 4 * spec.num_heads * spec.head_dim * pairs / tensors


def intensity_drop(m: Machine) -> float:
    """Arithmetic intensity of a prompt of 1024 / of a decode, for the op with the smallest drop."""
    ops = ("attention", *m.ops.model.gemms(1))
    return min(intensity(m, op, LENGTH, 1) / intensity(m, op, 1, 1) for op in ops)


def ridge(m: Machine) -> float:
    """Peak FLOPs / memory bandwidth of the data sheet."""
    return m.device.peak_flops / m.device.memory_bandwidth


def fitting_batch(m: Machine, length: int, pp: int = 1, layers: int | None = None) -> float:
    """Requests in each of ``pp`` micro-batches, with 0.9 of the memory usable; of a model cut to
    ``layers``."""
    stages = stage_layers(layers or m.layers, pp)
    return max_batch(
        kv_capacity_tokens(m.ops.model, m.device, m.ops.tp, stages),
        length,
        pp,
    )


def batch_ratio(m: Machine, length: int, pp: int = 1, layers: int | None = None) -> float:
    """:func:`fitting_batch` / that of the whole model without a pipeline."""
    return fitting_batch(m, length, pp, layers) / fitting_batch(m, length)


CHUNK = 256


def decode_speedup(m: Machine, batch: int, length: int) -> float:
    """Section 5.1.1's definition: a decode's marginal time is the time beyond the chunk alone."""
    piggybacked = batch - 1
    alone = [(CHUNK - piggybacked, 0)]
    only = m.iteration(decodes=batch, context=length).total_s / batch
    with_decodes = m.iteration(alone, decodes=piggybacked, context=length).total_s
    return only * piggybacked / (with_decodes - m.iteration(alone).total_s)


def extreme_decode_speedup(m: Machine, which: Extreme) -> float:
    """The least or largest speedup over all lengths and batches from 2 to the largest."""
    return _EXTREMES[which](
        decode_speedup(m, batch, length)
        for length, most in MAX_BATCH.items()
        for batch in range(2, most + 1)
    )


# End to end on one GPU, against the baseline (5.1.2 to 5.2, 5.4, Table 4) -------------------------
#
# Every request has P prompt and D output tokens, P + D being the sequence length. The baseline runs
# prefill-only and decode-only batches (request-level batching of B); Sarathi's chunk is
# C - (B - 1), so that chunk and decodes make C rows (section 4.4). The paper's own settings confirm
# this: each P:D at which it states a peak (14, 28, 50, 63, 127) is (C - (B - 1)) / (B - 1), and the
# prompt is then a whole number of such chunks.

PARTS = {
    "ffn": ("ffn_ln1", "ffn_ln2"),
    "proj": ("preproj", "postproj"),
    "attention": ("attention", "mixing"),
}
"""Groups of ops."""
PD_RANGE = (*range(1, 60), *range(60, 201, 20))
"""P:D from 1 to 200, the range that the paper says it covers (section 6)."""
BATCHES = {
    1024: (4, 8, 12, 18),
    2048: (4, 6, 8, 10),
    3072: (4, 5, 6),
}
"""Batch sizes by length: up to the largest batch, and from where P:D = C/(B-1) is at most 200."""

Name = str | int
"""A policy: baseline, orca_best, orca_worst; or Sarathi, by its chunk."""
_POLICIES: dict[Name, Policy] = {
    "baseline": RequestLevel(),
    "orca_best": Orca(max_prefills=1),
    "orca_worst": OrcaWorstCase(),
}


def policy_of(name: Name, rule: ChunkRule = "reserve") -> Policy:
    """The policy; a chunk C that is no multiple of the tile is kept as it is, as in the paper."""
    if isinstance(name, int):
        return Sarathi(name, TILE if name % TILE == 0 else 64, rule)
    return _POLICIES[name]


def split(length: int, pd: float) -> tuple[int, int]:
    """Prompt and output tokens; the prompt is rounded down, to a whole number of chunks."""
    prompt = min(max(1, int(length * pd / (1 + pd) + 1e-9)), length - 1)
    return prompt, length - prompt


def balanced(chunk: int, batch: int) -> float:
    """P:D with equal numbers of chunks and decode iterations."""
    return (chunk - (batch - 1)) / (batch - 1)


@cache
def served(
    m: Machine, policy: Name, batch: int, length: int, pd: float, rule: ChunkRule = "reserve"
) -> Throughput:
    """Equal requests of one length and P:D under a policy."""
    # The baseline's batches follow each other without overlap, so a single one is enough.
    rounds = 1 if policy == "baseline" else 20
    return m.serve(policy_of(policy, rule), batch, *split(length, pd), rounds)


def served_token_s(m: Machine, op: str, policy: Name, chunk: int, length: int, batch: int) -> float:
    """Seconds a token in a group of ops (or in ``all``), at the P:D that suits the chunk."""
    run = served(m, policy, batch, length, balanced(chunk, batch))
    return run.share(run.ops if op == "all" else PARTS.get(op, (op,)))


def served_token_ms(m: Machine, **setting: Any) -> float:
    """:func:`served_token_s` in milliseconds."""
    return 1e3 * served_token_s(m, **setting)


def gain(
    m: Machine, policy: Name, batch: int, length: int, pd: float, rule: ChunkRule = "reserve"
) -> float:
    """Throughput over the baseline's throughput."""
    ours = served(m, policy, batch, length, pd, rule).tokens_per_s
    return ours / served(m, "baseline", batch, length, pd).tokens_per_s


def balanced_gain(m: Machine, policy: Name, length: int, chunk: int = CHUNK) -> float:
    """Gain at the largest batch, and the P:D that suits ``chunk``."""
    batch = MAX_BATCH[length]
    return gain(m, policy, batch, length, balanced(chunk, batch))


def farthest_gain(m: Machine, policy: Name) -> float:
    """The :func:`balanced_gain` that is farthest from 1, over the three lengths."""
    return max((balanced_gain(m, policy, n) for n in MAX_BATCH), key=lambda value: abs(value - 1))


def gains(m: Machine, policy: Name) -> dict[float, float]:
    """Gain by P:D at 1K and B = 18."""
    return {pd: gain(m, policy, MAX_BATCH[LENGTH], LENGTH, pd) for pd in PD_RANGE}


def peak_gain(m: Machine, policy: Name) -> float:
    """The largest of :func:`gains`."""
    return max(gains(m, policy).values())


def peak_pd(m: Machine, policy: Name) -> float:
    """The P:D of :func:`peak_gain`."""
    curve = gains(m, policy)
    return max(curve, key=lambda pd: curve[pd])


def typical_gain(m: Machine) -> float:
    """Median over P:D of the larger one of the :func:`gains` of chunks 256 and 512."""
    return median(
        map(
            max,
            gains(m, 256).values(),
            gains(m, 512).values(),
        )
    )


def always_above(m: Machine, policy: Name, other: Name) -> float:
    """1 if each of a policy's :func:`gains` is above another one's, else 0."""
    ours, theirs = gains(m, policy), gains(m, other)
    return float(all(ours[pd] > theirs[pd] for pd in PD_RANGE))


def extreme_reduction(m: Machine, ops: str, which: Extreme) -> float:
    """Time in a group of ops a token under the baseline / under Sarathi, at the balanced P:D: the
    least or largest over chunks, lengths and batches."""
    return _EXTREMES[which](
        served_token_s(m, ops, "baseline", chunk, length, batch)
        / served_token_s(m, ops, chunk, chunk, length, batch)
        for chunk in (256, 512)
        for length, batches in BATCHES.items()
        for batch in batches
    )


def chunk_overhead(m: Machine, chunk: int, part: Part = "total", length: int = LENGTH) -> float:
    """Time of a prompt in chunks / in one piece; or of a part of it."""
    chunked, whole = (getattr(m.prefill(length, c), f"{part}_s") for c in (chunk, None))
    return float(chunked / whole)


def efficiency_loss(m: Machine, chunk: int) -> float:
    """Percent of the prefill rate that chunking loses."""
    return 100 * (1 - 1 / chunk_overhead(m, chunk))


def end_to_end(m: Machine, chunk: Name) -> float:
    """Throughput gain of Sarathi at 1K, B = 18, at the P:D that suits the chunk."""
    return balanced_gain(m, chunk, LENGTH, int(chunk))


def exceeds(m: Machine, what: str, of: Name, over: Name) -> float:
    """1 if a quantity is larger of one policy than of another, else 0."""
    quantity = {"peak_gain": peak_gain, "peak_pd": peak_pd, "end_to_end": end_to_end}[what]
    return float(quantity(m, of) > quantity(m, over))


def pipeline_ratio(m: Machine, of: str, over: str, what: str = "makespan_s") -> float:
    """The ratio of two makespans, or of another number of runs; plain reading, seed 0."""
    return float(getattr(outcome(m, of), what) / getattr(outcome(m, over), what))


def held_out_error(m: Machine) -> float:
    """Percent: the median held-out errors of the device's op models on public measurements,
    weighted by their time in one of Sarathi's micro-batches."""
    block, fitted = m.block(256), m.device.fitted or {}
    parts = {
        "gemm": sum(time for op, time in block.items() if op in GEMMS),
        "add": block["others"],
        "all_reduce_8": block["all_reduce"],
        "attn_context": float(m.ops.prefill(230, 1000)),
        "attn_decode": float(m.ops.decode(26, 2100)),
    }
    # Of several models of an op, that of multi-head attention.
    names = {op: op if op in fitted else f"{op}_mha" for op in parts}
    errors = sum(fitted[names[op]].held_out.median_pct * time for op, time in parts.items())
    return errors / sum(parts.values())
