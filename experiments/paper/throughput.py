"""Sections 5.1.2 to 5.2 and Table 4: end-to-end throughput on one GPU, against the baseline.

Every request has P prompt and D output tokens, P + D being the sequence length. The baseline runs
prefill-only and decode-only batches (request-level batching of B); Sarathi's chunk is C - (B - 1),
so that chunk and decodes make C rows (section 4.4). The paper's own settings confirm this: each P:D
at which it states a peak (14, 28, 50, 63, 127) is (C - (B - 1)) / (B - 1), and the prompt is then a
whole number of such chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial

from sarathi_sim.experiments.paper.decode_speedup import MAX_BATCH, TABLE_4, table_4_machine
from sarathi_sim.experiments.paper.register import reads
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.experiments.run.machine import Machine, Throughput
from sarathi_sim.policies.orca import Orca, OrcaWorstCase
from sarathi_sim.policies.request_level import RequestLevel
from sarathi_sim.policies.sarathi import ChunkRule, Sarathi

TILE = 128
LINEAR = {"ffn": ("ffn_ln1", "ffn_ln2"), "proj": ("preproj", "postproj")}
PD_RANGE = (*range(1, 60), *range(60, 201, 20))
"""P:D from 1 to 200, the range that the paper says it covers (section 6)."""


def split(length: int, pd_ratio: float) -> tuple[int, int]:
    """Prompt and output tokens; the prompt is rounded down, to a whole number of chunks."""
    prompt = min(max(1, int(length * pd_ratio / (1 + pd_ratio) + 1e-9)), length - 1)
    return prompt, length - prompt


def balanced(chunk: int, batch: int) -> float:
    """P:D at which chunks and decode iterations are equally many."""
    return (chunk - (batch - 1)) / (batch - 1)


Scheduling = Orca | OrcaWorstCase | RequestLevel | Sarathi
"""What is compared; each one object, so that what it served can be kept."""

BASELINE, ORCA_BEST, ORCA_WORST = RequestLevel(), Orca(max_prefills=1), OrcaWorstCase()


@cache
def sarathi(chunk: int, rule: ChunkRule = "reserve") -> Sarathi:
    """Chunk C - (B - 1), or by another rule.

    A C that is no multiple of the tile is kept as it is, as in the paper.
    """
    return Sarathi(chunk, TILE if chunk % TILE == 0 else 64, rule)


@cache
def served(m: Machine, policy: Scheduling, batch: int, length: int, pd_ratio: float) -> Throughput:
    """Equal requests of one length and P:D under a policy.

    The baseline's batches follow each other without overlap, so one of them says it all.
    """
    rounds = 1 if policy is BASELINE else 20
    return m.serve(policy, batch, *split(length, pd_ratio), rounds)


def gain(m: Machine, policy: Scheduling, batch: int, length: int, pd_ratio: float) -> float:
    """Throughput over that of the baseline."""
    ours = served(m, policy, batch, length, pd_ratio).tokens_per_s
    return ours / served(m, BASELINE, batch, length, pd_ratio).tokens_per_s


def gains(
    m: Machine, policy: Scheduling, length: int, ratios: Iterable[float] = PD_RANGE
) -> dict[float, float]:
    """Gain by P:D at the largest batch."""
    return {pd: gain(m, policy, MAX_BATCH[length], length, pd) for pd in ratios}


def peak(lab: Lab, chunk: int) -> tuple[float, float]:
    """The P:D at which the gain at 1K and B = 18 peaks, and its value there."""
    curve = gains(lab.a6000, sarathi(chunk), 1024)
    at = max(curve, key=lambda pd: curve[pd])
    return at, curve[at]


_GAIN = (
    "tokens a second against request-level batching; both simulated on 20 B equal requests; "
    "chunk C - (B - 1)"
)


def table_4_gain(lab: Lab, row: str) -> float:
    """Throughput gain of one row."""
    length, batch, pd_ratio = TABLE_4[row]
    return gain(table_4_machine(lab, row), sarathi(256), batch, length, pd_ratio)


for _row in TABLE_4:
    reads(f"peak_{_row}_gain", _GAIN)(partial(table_4_gain, row=_row))

for _chunk in (256, 512):
    reads(f"pd_peak_{_chunk}_gain", _GAIN + "; the largest over whole P:D from 1 to 200")(
        lambda lab, chunk=_chunk: peak(lab, chunk)[1]  # type: ignore[misc]
    )
    reads(f"pd_peak_{_chunk}_at", _GAIN + "; the P:D of the largest")(
        lambda lab, chunk=_chunk: peak(lab, chunk)[0]  # type: ignore[misc]
    )


# Time by op (5.1.4) ------------------------------------------------------------------------------

BATCHES = {1024: (4, 8, 12, 18), 2048: (4, 6, 8, 10), 3072: (4, 5, 6)}
"""Batch sizes by length: up to what fits, and from where P:D = C/(B-1) is at most 200."""


def reduction(m: Machine, ops: str, batch: int, length: int, chunk: int) -> float:
    """Time in a group of ops a token under the baseline / under Sarathi, at the balanced P:D."""
    pd_ratio = balanced(chunk, batch)
    before = served(m, BASELINE, batch, length, pd_ratio)
    after = served(m, sarathi(chunk), batch, length, pd_ratio)
    return before.share(LINEAR[ops]) / after.share(LINEAR[ops])


def reductions(lab: Lab, ops: str) -> list[float]:
    """Over chunks, lengths and batches."""
    return [
        reduction(lab.a6000, ops, batch, length, chunk)
        for chunk in (256, 512)
        for length, batches in BATCHES.items()
        for batch in batches
    ]


for _ops in LINEAR:
    for _end, _pick in (("min", min), ("max", max)):
        reads(
            f"{_ops}_reduction_{_end}",
            "time in these ops under the baseline / under Sarathi, chunks 256 and 512, lengths 1K "
            "to 3K, four batch sizes from 4 to what fits, P:D = (C - (B - 1)) / (B - 1)",
        )(lambda lab, ops=_ops, pick=_pick: pick(reductions(lab, ops)))  # type: ignore[misc]


# Orca (5.2) --------------------------------------------------------------------------------------

_AT = "; at P:D = 239/17, 247/9, 251/5 (the paper's 256/(B - 1), see its peak at 14)"


def at_full_batch(lab: Lab, policy: Scheduling, length: int) -> float:
    """Gain at the largest batch, and the P:D that is best for chunk 256."""
    batch = MAX_BATCH[length]
    return gain(lab.a6000, policy, batch, length, balanced(256, batch))


@reads("orca_best_1k", _GAIN + _AT + "; at most one whole prompt joins an iteration")
def _orca_best(lab: Lab) -> float:
    return at_full_batch(lab, ORCA_BEST, 1024)


@reads("orca_worst", "requests begin and end together; the farthest from 1 of the three lengths")
def _orca_worst(lab: Lab) -> float:
    values = [at_full_batch(lab, ORCA_WORST, length) for length in MAX_BATCH]
    return max(values, key=lambda value: abs(value - 1))


for _k, _length in enumerate(MAX_BATCH, 1):
    reads(f"sarathi_{_k}k", _GAIN + _AT)(
        lambda lab, length=_length: at_full_batch(lab, sarathi(256), length)  # type: ignore[misc]
    )
