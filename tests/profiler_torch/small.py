"""Small models and loads, shared by the tests of the engine and of what is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.simulator.loop.clock import quantize

MAX_LENGTH = 96
MHA = replace(load_model("tiny-llama-40m"), num_layers=3, hidden_size=64, num_heads=4,
              num_kv_heads=4, head_dim=16, ffn_hidden_size=128, vocab_size=96)  # fmt: skip
GQA = replace(MHA, num_kv_heads=2)
PLAIN = replace(MHA, gated_ffn=False, learned_positions=True, norm_bias=True, ffn_bias=True,
                attention_bias="all")  # fmt: skip


def requests(count: int, seed: int, rate: float | None = None) -> list[Request]:
    """Random lengths; all at t = 0, or Poisson arrivals at ``rate`` per second."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count)) if rate else np.zeros(count)
    found = []
    for i, when in enumerate(quantize(arrival).tolist()):
        prompt, output = int(rng.integers(3, 70)), int(rng.integers(1, 20))
        found.append(Request(i, when, prompt, output, MAX_LENGTH - prompt))
    return found


def settings(in_flight: int = 1, max_batch: int = 4) -> dict[str, Any]:
    room = {"kv_capacity": max_batch * in_flight * MAX_LENGTH, "max_length": MAX_LENGTH}
    return {"max_batch": max_batch, "max_in_flight": in_flight, **room}
