"""Section 5.4: the cost of chunking, and the remaining gain."""

from __future__ import annotations

from functools import partial

from sarathi_sim.experiments.paper.register import reads
from sarathi_sim.experiments.paper.throughput import balanced, gain, sarathi
from sarathi_sim.experiments.paper.variants import Lab

CHUNKS = (64, 128, 192, 256, 320, 384, 448, 512)
LENGTH, BATCH = 1024, 18


def attention_overhead(lab: Lab, chunk: int, length: int = LENGTH) -> float:
    """Attention time of a prompt in chunks / in one piece."""
    m = lab.a6000
    return m.prefill(length, chunk).attention_s / m.prefill(length).attention_s


def prefill_overhead(lab: Lab, chunk: int, length: int = LENGTH) -> float:
    """Time of a prompt in chunks / in one piece."""
    m = lab.a6000
    return m.prefill(length, chunk).total_s / m.prefill(length).total_s


def end_to_end(lab: Lab, chunk: int) -> float:
    """Throughput gain at 1K, B = 18, at the P:D that suits the chunk."""
    return gain(lab.a6000, sarathi(chunk), BATCH, LENGTH, balanced(chunk, BATCH))


_PROMPT = "a prompt of 1024 tokens, prefill only"
reads("ablation_attn_64", _PROMPT)(partial(attention_overhead, chunk=64))
reads("ablation_prefill_64", _PROMPT)(partial(prefill_overhead, chunk=64))
reads("ablation_prefill_128", _PROMPT)(partial(prefill_overhead, chunk=128))


def efficiency_loss(lab: Lab, chunk: int) -> float:
    """Percent of the prefill rate that chunking loses."""
    return 100 * (1 - 1 / prefill_overhead(lab, chunk))


for _chunk in (256, 512):
    reads(f"ablation_prefill_{_chunk}", _PROMPT + "; 1 - full / chunked")(
        partial(efficiency_loss, chunk=_chunk)
    )

_GAIN = "throughput gain at 1K, B = 18, P:D = (C - 17) / 17, where the chunk does best"
for _chunk in (64, 128):
    reads(f"ablation_e2e_{_chunk}", _GAIN)(partial(end_to_end, chunk=_chunk))


def _256_over_320(lab: Lab) -> float:
    return float(end_to_end(lab, 256) > end_to_end(lab, 320))


reads(
    "ablation_256_over_320",
    _GAIN + " for each of the two; control: GEMMs without the step past a multiple of the tile",
    control=lambda lab: _256_over_320(lab.untiled),
)(_256_over_320)
