"""Sections 3.1, 4.2 and 4.4: the cost of an iteration, and the number of requests that fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sarathi_sim.experiments.paper.register import reads
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.experiments.run.machine import Iteration, Machine
from sarathi_sim.simulator.load.engine_memory import kv_capacity_tokens, max_batch, stage_layers

LENGTH = 1024
SATURATED = 1.05
"""A rate is saturated where the next size, twice as large, gains less than 5 %."""


def decode_cost(lab: Lab, batch: int) -> float:
    """Cost of a decoded token / cost of a prompt token, at one batch size."""
    m = lab.a6000
    decode = m.iteration(decodes=batch, context=LENGTH).total_s / batch
    return decode * LENGTH * batch / m.prefill(LENGTH, prompts=batch).total_s


for _batch in (1, 2, 18):
    reads(
        f"decode_cost_b{_batch}",
        "time of a decode iteration at context 1024 per token, over that of prompts of 1024 tokens "
        "at the same batch size",
    )(partial(decode_cost, batch=_batch))


@reads(
    "others_share",
    "elementwise ops (norms, activation, residual additions, rotary) of one block's prefill of "
    "1024 tokens, the phase where their share is largest",
)
def _others_share(lab: Lab) -> float:
    m = lab.a6000
    block = m.block(LENGTH)
    return 100 * block["others"] / (sum(block.values()) + m.attention(LENGTH) / m.layers)


SIZES = (64, 128, 256, 512, 1024, 2048)


@reads("prefill_peak", "the best of a single layer over B x L = 512, 1024, 2048 and 4096 tokens")
def prefill_peak(lab: Lab) -> float:
    """Tokens a millisecond."""
    m = lab.a6000
    return 1e-3 * max(
        m.prefill_rate(512),
        m.prefill_rate(1024),
        m.prefill_rate(1024, prompts=2),
        m.prefill_rate(1024, prompts=4),
    )


def saturation(rate: Callable[[int], float], sizes: tuple[int, ...]) -> float:
    """The first of ``sizes`` (each twice the one before) that the next gains less than 5 % on."""
    for size in sizes:
        if rate(2 * size) < SATURATED * rate(size):
            return size
    return 2 * sizes[-1]


@reads(
    "decode_saturation_batch",
    "the first power of two from which doubling the batch gains less than 5 %",
)
def _decode_saturation(lab: Lab) -> float:
    return saturation(
        lambda batch: lab.a6000.decode_rate(batch, LENGTH), (16, 32, 64, 128, 256, 512)
    )


@reads("chunk256_loss", "a single layer's prefill rate at 256 tokens against its peak")
def _chunk256_loss(lab: Lab) -> float:
    return 100 * (1 - 1e-3 * lab.a6000.prefill_rate(256) / prefill_peak(lab))


@reads(
    "gpt3_saturation_chunk",
    "the first power of two from which doubling the prompt gains less than 5 %",
)
def _gpt3_saturation(lab: Lab) -> float:
    return saturation(lab.machine("a100-80g-sxm", "gpt3-175b").prefill_rate, SIZES)


# What fits: B = floor((M_G - M_S) / (L * m_kv)) ------------------------------------------------


def fitting_batch(machine: Machine, length: int, tp: int = 1, pp: int = 1) -> float:
    """Requests in each of ``pp`` micro-batches, with 0.9 of the memory usable."""
    layers = stage_layers(machine.layers, pp)
    return max_batch(kv_capacity_tokens(machine.ops.model, machine.device, tp, layers), length, pp)


_FITS = "0.9 of the data sheet's memory (decimal) for weights and KV; the longest length reserved"
for _id, _length in (("max_batch_1k", 1024), ("max_batch_2k", 2048), ("max_batch_3k", 3072)):
    reads(_id, _FITS)(lambda lab, length=_length: fitting_batch(lab.a6000, length))  # type: ignore[misc]
for _id, _pp in (("pp_batch", 8), ("tp_batch", 1)):
    reads(_id, _FITS + "; batch of each micro-batch")(
        lambda lab, pp=_pp: fitting_batch(  # type: ignore[misc]
            lab.machine("a100-80g-sxm", "gpt3-175b", 8), 4096, 8, pp
        )
    )


# Table 2 -----------------------------------------------------------------------------------------

SCHEMES: dict[str, Callable[[Machine], Iteration]] = {
    "prefill1024": lambda m: m.prefill(1024),
    "decode4": lambda m: m.iteration(decodes=4, context=1024),
    "mixed": lambda m: m.iteration([(1021, 0)], decodes=3, context=1024),
}
"""The three batches of Table 2. Its prefill row says batch 4, but 1024 tokens at 0.229 ms each is
one prompt of 1024: four would be 4.5 times the GPU's peak."""

_PARTS = {"linear": "linear_s", "attn": "attention_s", "total": "total_s"}
for _scheme, _run in SCHEMES.items():
    for _part, _name in _PARTS.items():
        reads(
            f"{_scheme}_{_part}",
            "one iteration of all 40 layers; linear is all but attention, as linear + attention = "
            "total in the table",
        )(lambda lab, run=_run, name=_name: 1e3 * getattr(run(lab.a6000), name))  # type: ignore[misc]


@reads("decode4_per_token", "iteration time / 4")
def _decode4_per_token(lab: Lab) -> float:
    return 1e3 * SCHEMES["decode4"](lab.a6000).total_s / 4


@reads(
    "mixed_decode_per_token",
    "the extra time of 1021 + 3 tokens over a prompt of 1024, / 3 (the table: (238.4 - 234.8) / 3)",
)
def _mixed_decode_per_token(lab: Lab) -> float:
    m = lab.a6000
    return 1e3 * (SCHEMES["mixed"](m).total_s - SCHEMES["prefill1024"](m).total_s) / 3


# Tile quantisation -------------------------------------------------------------------------------

for _tokens in (128, 256, 257):
    reads(f"tile_{_tokens}", "one iteration of one prompt, all layers, embedding and LM head")(
        lambda lab, tokens=_tokens: 1e3 * lab.a6000.prefill(tokens).total_s  # type: ignore[misc]
    )
