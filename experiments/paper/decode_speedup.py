"""Section 5.1.1 and Table 4: the cost of a decode that piggybacks on a chunk."""

from __future__ import annotations

from functools import partial

from sarathi_sim.experiments.paper.register import reads
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.experiments.run.machine import Machine

CHUNK = 256
MAX_BATCH = {1024: 18, 2048: 10, 3072: 6}
"""The most requests the paper fits, by sequence length."""

_TEXT = (
    "decode-only iteration per token, over the marginal time per token of B - 1 decodes on a chunk "
    "of 256 - (B - 1) (section 4.4: chunk and decodes fill two tiles)"
)


def decode_speedup(machine: Machine, batch: int, length: int) -> float:
    """Section 5.1.1's definition: marginal time is that over the chunk alone."""
    piggybacked = batch - 1
    alone = [(CHUNK - piggybacked, 0)]
    only = machine.iteration(decodes=batch, context=length).total_s / batch
    with_decodes = machine.iteration(alone, decodes=piggybacked, context=length).total_s
    return only * piggybacked / (with_decodes - machine.iteration(alone).total_s)


def speedups(lab: Lab) -> list[float]:
    """Over all batches from 2 to what fits, and all lengths."""
    return [
        decode_speedup(lab.a6000, batch, length)
        for length, most in MAX_BATCH.items()
        for batch in range(2, most + 1)
    ]


@reads("decode_speedup_min", _TEXT + "; smallest over B from 2 to 18, 10 and 6 at 1K, 2K and 3K")
def _least(lab: Lab) -> float:
    return min(speedups(lab))


@reads("decode_speedup_max", _TEXT + "; largest over B from 2 to 18, 10 and 6 at 1K, 2K and 3K")
def _most(lab: Lab) -> float:
    return max(speedups(lab))


TABLE_4 = {
    "13b_1k": (1024, 6, 50),
    "13b_2k": (2048, 6, 50),
    "13b_3k": (3072, 6, 50),
    "33b_1k": (1024, 10, 28),
    "33b_2k": (2048, 5, 63),
    "33b_3k": (3072, 3, 127),
}
"""Row of Table 4 -> sequence length, batch, P:D."""


def table_4_machine(lab: Lab, row: str) -> Machine:
    """LLaMA-13B's or LLaMA-33B's."""
    return lab.a6000 if row.startswith("13b") else lab.a100


def table_4_decode(lab: Lab, row: str) -> float:
    """Decode speedup of one row."""
    length, batch, _ = TABLE_4[row]
    return decode_speedup(table_4_machine(lab, row), batch, length)


for _row in TABLE_4:
    reads(f"peak_{_row}_decode", _TEXT)(partial(table_4_decode, row=_row))
