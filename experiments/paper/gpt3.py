"""Section 5.3: GPT-3 on 64 A100s. Claims are computed under the plain reading, seed 0."""

from __future__ import annotations

from sarathi_sim.experiments.paper.register import reads
from sarathi_sim.experiments.paper.scenarios import (
    DEVICE,
    MODEL,
    ORCA,
    SARATHI,
    TP,
    TP_ONLY,
    Assumptions,
    makespan,
)
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.ops import GEMMS

_PLAIN = "plain reading (token-level Zipf lengths, 8 micro-batches in flight), seed 0"
_ASSUMED = Assumptions()


def _seconds(lab: Lab, scenario: str) -> float:
    return makespan(lab, scenario, _ASSUMED, 0)[0]


@reads("pp_sarathi_vs_orca", _PLAIN)
def _orca_over_sarathi(lab: Lab) -> float:
    return _seconds(lab, ORCA) / _seconds(lab, SARATHI)


@reads("pp_tp_vs_orca", _PLAIN)
def _orca_over_tp(lab: Lab) -> float:
    return _seconds(lab, ORCA) / _seconds(lab, TP_ONLY)


@reads("pp_sarathi_vs_tp", _PLAIN)
def _tp_over_sarathi(lab: Lab) -> float:
    return _seconds(lab, TP_ONLY) / _seconds(lab, SARATHI)


@reads("pp_bubble_median", _PLAIN + "; a request's bubble time is the idle time before its batches")
def _bubble(lab: Lab) -> float:
    return makespan(lab, ORCA, _ASSUMED, 0)[1] / makespan(lab, SARATHI, _ASSUMED, 0)[1]


@reads(
    "sim_fidelity",
    "not the paper's check, which needs the GPUs: the median held-out errors of the A100's op "
    "models on public measurements, weighted by their time in one of Sarathi's micro-batches",
)
def _fidelity(lab: Lab) -> float:
    machine = lab.machine(DEVICE, MODEL, TP)
    block = machine.block(256)
    parts = {
        "gemm": sum(time for op, time in block.items() if op in GEMMS),
        "add": block["others"],
        "all_reduce_8": block["all_reduce"],
        "attn_context": float(machine.ops.prefill(230, 1000)),
        "attn_decode": float(machine.ops.decode(26, 2100)),
    }
    errors = sum(_median_error(machine.device, op) * time for op, time in parts.items())
    return errors / sum(parts.values())


def _median_error(device: DeviceSpec, op: str) -> float:
    """Percent; of several models of the op, the one of multi-head attention."""
    fitted = device.fitted or {}
    return fitted[op if op in fitted else f"{op}_mha"].held_out.median_pct
