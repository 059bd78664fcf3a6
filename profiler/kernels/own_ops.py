"""Ops with a behaviour of their own, neither a GEMM nor elementwise kernels: :data:`OWN_OPS`.

They are a mixture's experts on one rank, and the exchange of tokens with other ranks' experts. A
further op is a further entry: the class that times it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..facts.device import DeviceSpec, Link
from ..facts.formats import (
    MOE_BYTES,
    Kernels,
    Stack,
    release,
)
from ..facts.layer_kinds import Experts
from ..facts.model import ModelSpec
from ..facts.ops import ALL_TO_ALL, MOE
from ..facts.roofline import HALF, Array
from ..physics.shard_times import DOUBT
from .message_curves import SEND_LATENCY_US, ReduceCurve, reached, sent_us
from .moe_surface import (
    TILE,
    MoeSurface,
    moved_bytes,
    padded_us,
    rates_of,
)
from .stack_file import (
    Arrays,
    KernelFit,
    StackSpec,
    load_stack,
    stacks_on,
    stored,
    tables_beside,
)
from .wide_times import FROM, exchange, wide_experts

#: Half-widths in percent of times without held-out errors: experts unlike those of every measured
#: model in this format, and an all-to-all, whose tokens here spread evenly. Assumed. The first one
#: covers more than 90 % of the errors of experts without gates, too (docs/lab/models.md).
_UNLIKE_PCT, _EVEN_PCT = 50.0, 25.0
#: Where a stack's table holds DeepGEMM, and the other stacks' hold TensorRT-LLM's own kernels
#: (``flashinfer_trtllm``), which its server chooses among (inferred).
_TUNED = {("trtllm", "fp8_block", device) for device in ("b200-sxm", "b300-sxm", "gb200")}
#: vLLM's default on Hopper from 0.11 until before 0.14 was DeepGEMM, which pads each expert's rows
#: to tiles (pull requests 39331 in vllm-project/vllm, 120 in vllm-project/recipes; the end is
#: inferred). The tables hold Triton's kernel.
_PADDED = {("vllm", "fp8_block", device) for device in ("h100-80g-sxm", "h200-sxm")}
_PADDED_FROM, _PADDED_BELOW = release("0.11"), release("0.14")
#: On Blackwell vLLM and SGLang both run gpt-oss's experts in FlashInfer's ``trtllm_moe``. Where one
#: table lacks a shape in this format that the other holds, the other's counts.
_SHARED: dict[tuple[str, str], Stack] = {("vllm", "w4a8_mxfp4_mxfp8"): "sglang"}
_OCTAVES = 14
"""Tokens, as powers of two, at which formats are compared."""


def experts_name(kernels: Kernels) -> str:
    """The tables' name of the experts of these kernels."""
    return f"{kernels.experts_in}.{kernels.expert_distribution}"


@dataclass(eq=False)
class RankOp:
    """An op of one of ``tp`` x ``kernels.dp`` ranks of a mixture. ``arrays_of`` gives the arrays of
    one of the stack's tables by its name."""

    device: DeviceSpec
    kernels: Kernels
    model: ModelSpec
    tp: int
    spec: StackSpec
    arrays_of: Callable[[str], Arrays]

    def __post_init__(self) -> None:
        """Find the tables of an op."""

    @property
    def mix(self) -> Experts:
        """The model's experts."""
        assert self.model.experts is not None
        return self.model.experts

    @property
    def total(self) -> int:
        """All ranks."""
        return self.tp * self.kernels.dp


class ExpertTimes(RankOp):
    """Times of the experts of one rank, in microseconds. Experts without gates count as gated ones
    of two thirds of the width: as many weights and FLOPs. Raises SpecError where the experts were
    not measured, ValueError where the ranks do not divide them."""

    of_chip = True

    def __post_init__(self) -> None:
        device, kernels, model, tp = self.device, self.kernels, self.model, self.tp
        spread, mix, copies = kernels.expert_parallel, self.mix, kernels.redundant_experts
        if copies and not spread:
            raise ValueError("redundant_experts need expert_parallel: true")
        slots = mix.num_experts + copies
        size = slots if spread else mix.intermediate_size
        if size % self.total:
            what = "num_experts" if spread else "the experts' intermediate_size"
            what += f" + {copies} redundant_experts" if copies else ""
            raise ValueError(
                f"{model.name}: tp {tp}{f' x dp {kernels.dp}' if kernels.dp > 1 else ''} does not "
                f"divide {what} ({size}); allowed here: expert_parallel: "
                f"{'false' if spread else 'true'}, or another tp"
            )
        self.ranks = (1, self.total) if spread else (self.total, 1)
        width = mix.intermediate_size * (3 if model.gated_ffn else 2) / 3
        self.shape = (model.hidden_size, max(1, round(width)), mix.top_k, slots, *self.ranks)
        self._wide = wide_experts(device, kernels, self.shape)
        if copies and self._wide is None:
            kernels = replace(kernels, expert_distribution="balanced")
        if self._wide is None:
            self.spec.need(MOE, experts_name(kernels), "moe_dtype, expert_distribution")
        self.kernels = kernels

    def time_us(self, tokens: Array) -> tuple[Array, Array]:
        """The time of the chosen experts of a layer's ``tokens`` (those of all ranks), and the
        bytes moved."""
        dtype, flat = self.kernels.experts_in, np.ravel(tokens)
        device, spread = self.device.same_chip or self.device.name, self.kernels.expert_distribution
        rates = rates_of(device, dtype, spread)
        moved = moved_bytes(
            np.array([self.shape], np.float64),
            flat,
            MOE_BYTES[dtype],
        )
        if self._wide is not None:
            return self._wide.time_us(tokens), moved.reshape(np.shape(tokens))
        if self._padded:
            return padded_us(self.shape, tokens, rates), moved.reshape(np.shape(tokens))
        kernels = (one.time_us(tokens, self.shape, rates) for one in self._choices.values())
        return np.minimum.reduce([*kernels]), moved.reshape(np.shape(tokens))

    def provenance(self) -> tuple[str, float]:
        """The origin of the experts' times, and the half-width of their band in percent."""
        if self._wide is not None:
            return self._gateless(self._wide.mark, self._wide.half_width_pct)
        if self._padded:
            named = f"{self.kernels.experts_in} experts of {self.kernels.named} on Hopper"
            return f"modelled: {named}, all of them in tiles of {TILE} rows", _UNLIKE_PCT
        own, *others = self._choices
        known = self.spec
        if own != self.kernels.stack:
            known = load_stack(self.device.same_chip or self.device.name, own)[0]
        fit = known.kernels[f"{MOE}.{experts_name(self.kernels)}"]
        kind = self._choices[own].from_what(self.shape)
        origin = fit.origin(kind == "between")
        faster = f", or {' or '.join(others)}'s where faster" if others else ""
        mark = (
            f"{origin}: {self.kernels.experts_in} experts of {own} "
            f"{fit.version}{faster}, tokens {self.kernels.expert_distribution}, "
            f"tp {self.ranks[0]} x ep {self.ranks[1]}, {FROM[kind]}"
        )
        if self.kernels.redundant_experts:
            mark += "; copies make the load even (assumed)"
        mark, width = self._gateless(mark, fit.half_width_pct(kind, _UNLIKE_PCT))
        doubt, doubted_pct = self._doubt(fit.version)
        return mark + doubt, max(width, doubted_pct)

    def _gateless(self, mark: str, width: float) -> tuple[str, float]:
        """The mark and half-width, for experts without gates."""
        if self.model.gated_ffn:
            return mark, width
        mark += "; without gates: as gated ones of two thirds of the width (assumed)"
        return mark, max(width, _UNLIKE_PCT)

    def _doubt(self, version: str) -> tuple[str, float]:
        """The doubt about experts in fp8, and the percent by which a faster kernel may undercut
        them; empty if they are faster than experts in bf16.

        Half the bytes at twice the FLOP/s cannot take longer in an equally good kernel. On Hopper
        vLLM's table of fp8 holds FlashInfer's CUTLASS kernel for ModelOpt's checkpoints only, the
        tables of bf16 and fp8_block hold Triton's, too. The ratio of fp8 to the fastest is known.
        """
        if self.kernels.experts_in != "fp8":
            return "", 0.0
        device, spread = self.device.same_chip or self.device.name, self.kernels.expert_distribution
        tokens, times = np.exp2(np.arange(_OCTAVES, dtype=np.float64)), dict[str, Array]()
        for dtype in ("fp8", "bf16", "fp8_block"):
            table = f"{MOE}.{dtype}.{spread}"
            if table in self.spec.kernels:
                surface = MoeSurface.from_arrays(self.arrays_of(table))
                times[dtype] = surface.time_us(tokens, self.shape, rates_of(device, dtype, spread))
        slower = {dtype: times["fp8"] / time for dtype, time in times.items()}
        if np.median(slower.get("bf16", slower["fp8"])) <= 1:
            return "", 0.0
        told = " and ".join(
            f"{ratio.min():.1f} to {ratio.max():.1f} times as long as in {dtype}"
            for dtype, ratio in slower.items()
            if dtype != "fp8"
        )
        block = "fp8_block" in times
        advice = "; published fp8 checkpoints are in blocks: give dtype fp8_block" if block else ""
        doubt = f"experts in fp8 take {told} by the tables of {self.kernels.stack} {version}"
        best = slower["fp8_block" if block else "bf16"]
        pct = 100 * float(best.max() - 1)
        return (
            f"{DOUBT}{doubt}{advice} (their band reaches down by a factor of {best.max():.1f})",
            pct,
        )

    @property
    def _padded(self) -> bool:
        """Whether all experts are computed, in tiles."""
        kernels = self.kernels
        old = bool(kernels.version) and _PADDED_FROM <= release(kernels.version) < _PADDED_BELOW
        return old and (kernels.stack, kernels.experts_in, self.device.name) in _PADDED

    @cached_property
    def _choices(self) -> dict[str, MoeSurface]:
        """The kernels among which the stack chooses, by their stacks; its own first."""
        table = f"{MOE}.{experts_name(self.kernels)}"
        found = {self.kernels.stack: self.arrays_of(table)}
        if (self.kernels.stack, self.kernels.experts_in, self.device.name) in _TUNED:
            found |= tables_beside(self.device.name, self.kernels.stack, table)
        surfaces = {str(stack): MoeSurface.from_arrays(arrays) for stack, arrays in found.items()}
        return self._shared(table) or surfaces

    def _shared(self, table: str) -> dict[str, MoeSurface]:
        """The surface of a stack that runs the same kernel, if it alone measured this shape."""
        other = _SHARED.get((self.kernels.stack, self.kernels.experts_in))
        if other is None or other not in stacks_on(self.device.name):
            return {}
        spec, arrays = load_stack(self.device.name, other)
        mine = MoeSurface.from_arrays(self.arrays_of(table))
        theirs = MoeSurface.from_arrays(stored(arrays, table)) if table in spec.kernels else mine
        alone = theirs.from_what(self.shape) == "between" != mine.from_what(self.shape)
        return {other: theirs} if alone else {}


class ExchangeTimes(RankOp):
    """Dispatch and combine: each GPU sends its share of its group's tokens to the GPUs of their
    experts, and back. Without data-parallel attention the ``tp`` ranks are the one group."""

    of_chip = False

    def __post_init__(self) -> None:
        kernels, mix, self._wide = self.kernels, self.mix, None
        if kernels.moe_a2a_backend != "nccl":
            slots = mix.num_experts + kernels.redundant_experts
            shape = (self.model.hidden_size, mix.top_k, slots, self.total)
            self._wide = exchange(self.device, kernels, shape)

    def time_us(self, tokens: Array) -> tuple[Array, Array]:
        """A token goes once to every rank that holds one or more of its experts."""
        each = reached(self.mix.top_k, self.total)
        num_bytes = HALF * tokens / self.tp * each * self.model.hidden_size
        if self._wide is not None:
            return self._wide.time_us(np.asarray(tokens / self.tp)), num_bytes
        if self._exchange is not None:
            curve = ReduceCurve.from_arrays(self.arrays_of(f"{ALL_TO_ALL}.nccl.{self.total}"))
            return 2 * curve.time_us(num_bytes), num_bytes
        return 2 * sent_us(num_bytes * (self.total - 1) / self.total, self._link), num_bytes

    def provenance(self) -> tuple[str, float]:
        """The origin of its times, and the half-width of their band in percent."""
        if self._wide is not None:
            return self._wide.mark, self._wide.half_width_pct
        what = "dispatch and combine in bf16, tokens spread evenly over ranks (assumed)"
        fit = self._exchange
        if fit is None:
            link = f"{SEND_LATENCY_US:g} us + bytes / {self._link.kind}"
            return f"modelled: {link} (formula, no data); {what}", _EVEN_PCT
        width = max(fit.left_out["sizes"].half_width_pct, _EVEN_PCT)
        return f"measured: NCCL {fit.version} all-to-all; {what}", width

    @property
    def _link(self) -> Link:
        device, within = self.device, self.total <= self.device.gpus_per_node
        return device.intra_node if within or self.total == self.tp else device.inter_node

    @property
    def _exchange(self) -> KernelFit | None:
        return self.spec.kernels.get(f"{ALL_TO_ALL}.nccl.{self.total}")


class OwnOp(NamedTuple):
    """One op. ``times(device, kernels, model, tp, spec, arrays_of)`` is a :class:`RankOp`:
    ``time_us`` gives times and the bytes moved, ``provenance`` their mark and half-width, and
    ``of_chip`` says whether a device with the same chip and other memory is slower.

    ``runs`` says whether a model has the op. The laboratory fits its tables.
    """

    times: Callable[..., ExpertTimes | ExchangeTimes]
    runs: Callable[[ModelSpec, Kernels, int], bool]


OWN_OPS = {
    MOE: OwnOp(ExpertTimes, lambda model, kernels, tp: model.experts is not None),
    ALL_TO_ALL: OwnOp(
        ExchangeTimes,
        lambda model, kernels, tp: (
            model.experts is not None
            and (kernels.dp > 1 or (kernels.moe_a2a_backend != "none" and tp > 1))
        ),
    ),
}
