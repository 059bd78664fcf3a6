"""The time of any op of a model's shard, from a stack's kernels on a device; microseconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial

import numpy as np

from ..bundle.schema import BundleMeta, KernelOrigin
from ..facts.device import DeviceSpec, device_sha256, load_device
from ..facts.formats import SPEEDUP, Kernels
from ..facts.model import ModelSpec
from ..facts.ops import (
    ALL_REDUCE,
    DECODE,
    KV_UP,
    MOE,
    OPS,
    PREFILL,
    SENDS,
    names,
)
from ..facts.roofline import HALF, HBM_SHARE, Array
from ..physics.shard_times import DOUBT, KINDS, Provenance, identity
from .borrowed import with_borrowed
from .gemm_lattice import LEAST, FastestGemm, GemmLattice
from .message_curves import (
    CAPTURED_TOKENS,
    SEND_LATENCY_US,
    ReduceCurve,
    sent_us,
    stream_bytes,
)
from .own_ops import OWN_OPS, experts_name
from .stack_attention import (
    AS_TRTLLM_PCT,
    LESS,
    AttentionTable,
    StackAttention,
    attention_table,
    shipped_table,
    tables_of,
)
from .stack_file import (
    Arrays,
    KernelFit,
    StackSpec,
    gemms_beside,
    stack_sha256,
    stored,
    surfaces_sha256,
    tables_beside,
)

#: Half-widths, percent, of unmeasured ops: elementwise kernels, transfers, chunks after a prefix.
#: Assumed.
_ASSUMED_PCT = 25.0
#: Half-width of chunks after a prefix, from an RTX 4090 (vLLM 0.19.0), chunks from 256 tokens on.
_COMPOSED_PCT = 15.0
#: Half-width of windows composed from the whole context: the median error is 30 % for vLLM's and
#: TensorRT-LLM's prompts with windows of 128 and 1,024 tokens, 3 to 38 % for their decodes.
_WINDOWED_PCT = 40.0
#: Half-width of states unlike the measured ones: Mamba 2, and heads of other sizes. Assumed.
_OTHER_STATE_PCT = 60.0
#: How head counts lie in a table.
_AMONG = {"": "", "heads": ", between head counts", "beyond": ", beyond head counts"}
#: The tables cover contexts up to the model's longest, at least so many tokens.
_MOST_CONTEXT, _LEAST_CONTEXT = 131072, 8192
#: What the same chip with other memory adds to a half-width, percent. Assumed.
_DERIVED_PCT = 10.0


class StackTimes:
    """Op times of one ``tp`` rank of ``model`` with a stack's kernels. Raises SpecError for a
    device, stack, dtype, head dimension or ``tp`` that was not measured, and ValueError for a
    ``tp`` that does not fit the model."""

    def __init__(
        self,
        device: str,
        kernels: Kernels,
        model: ModelSpec,
        tp: int,
        fitted: tuple[StackSpec, Arrays] | None = None,
    ) -> None:
        """``fitted`` are other surfaces than the shipped ones."""
        self.device: DeviceSpec = load_device(device)
        self.kernels, self.model, self.tp = kernels, model, tp
        needed = [f"gemm.{kernels.dtype}", *tables_of(kernels, model)]
        needed += [f"{MOE}.{experts_name(kernels)}"] if model.experts else []
        self.spec, self._arrays = fitted or with_borrowed(device, kernels.named, needed)
        self._fitted_sha256 = surfaces_sha256(fitted[1]) if fitted else ""
        model.check_tp(tp)
        self.spec.need("gemm", kernels.dtype, "dtype")
        self.spec.need("gemm", "bf16", "dtype")
        table: Callable[[str], AttentionTable] = partial(shipped_table, device, kernels.named)
        if fitted is not None:
            table = lru_cache(lambda name: attention_table(stored(self._arrays, name)))
        self.attention = StackAttention(
            self.spec, table, kernels, model, tp, self.device, self._as_on,
            lambda tokens: self.by_rows(KV_UP, tokens),
        )  # fmt: skip
        if tp > 1:
            self.spec.need(ALL_REDUCE, f"{self._captured}.{self._ranks}", "kernel, tp")
        rank = self.device, kernels, model, tp, self.spec, partial(stored, self._arrays)
        self._own = {
            op: own.times(*rank) for op, own in OWN_OPS.items() if own.runs(model, kernels, tp)
        }

    @property
    def longest_context(self) -> int:
        """The longest context that counts as measured."""
        return min(max(self.model.max_position_embeddings, _LEAST_CONTEXT), _MOST_CONTEXT)

    @property
    def meta(self) -> BundleMeta:
        """The origin of the times; the same files give the same."""
        kernels, origins = self.kernels, self.provenance()
        lenders = sorted({fit.lender for fit in self.spec.kernels.values()} - {""})
        files = self._fitted_sha256 or stack_sha256(self.device.name, kernels.named, lenders)
        data_sheet = device_sha256(self.device.name)
        return BundleMeta(
            device=self.device.name,
            model=self.model.name,
            model_spec=self.model,
            tp=self.tp,
            source="modelled",
            created=self.spec.date,
            generator="kernels of a stack",
            dtype="bfloat16",
            notes="fitted to public kernel measurements; errors are in data/kernels",
            environment={
                "repository": self.spec.origin,
                "licence": self.spec.licence,
                **{op: origin.mark for op, origin in origins.items()},
            },
            device_file_sha256=data_sheet,
            kernels=KernelOrigin(
                used=kernels,
                sha256=files,
                half_width_pct={op: origin.half_width_pct for op, origin in origins.items()},
            ),
            content_sha256=identity(files, data_sheet, kernels, self.model, self.tp),
        )

    def by_rows(self, op: str, tokens: Array) -> Array:
        """An op on ``tokens`` rows: a GEMM, or elementwise kernels in turn."""
        found, shard = OPS[op], self.model.shard(self.tp)
        if op in self._own:
            time, moved = self._own[op].time_us(tokens)
            return self._as_on(time, moved) if self._own[op].of_chip else time
        if found.shape is not None:
            shape = found.shape(shard)
            time = self._choices(op).time_us(tokens, shape.n, shape.k)
            weight = self.kernels.number_bytes.weight if found.split else HALF
            moved = weight * (shape.n * shape.k + tokens * shape.k) + HALF * tokens * shape.n
            flop_us = 2e6 * tokens * shape.n * shape.k / self.device.peak_flops
            flop_us /= SPEEDUP[self.kernels.dtype] if found.split else 1.0
            least = np.maximum(1e6 * moved / self.device.memory_bandwidth, flop_us)
            return np.maximum(self._as_on(time, moved), LEAST * least)
        assert found.streams is not None
        if self._elementwise(op) in self.spec.kernels:
            curve = ReduceCurve.from_arrays(stored(self._arrays, self._elementwise(op)))
            return curve.time_us(stream_bytes(op, shard) * tokens)
        rate = HBM_SHARE * self.device.memory_bandwidth / 1e6
        alone = HALF * self.model.hidden_size * tokens > self._fused_bytes
        return sum(
            (
                s.times
                * np.maximum(HALF * s.numbers * tokens / rate, self.spec.floor_us)
                * np.where(alone, 1.0, not s.reduced)
                for s in found.streams(shard)
            ),
            np.zeros(np.shape(tokens)),
        )

    def prefill(self, chunk: Array, context: Array) -> Array:
        """One sequence's chunk after ``context`` cached tokens, in a mean layer."""
        return self.attention.prefill(chunk, context)

    def decode(self, batch: Array, context: Array) -> Array:
        """One token for each of ``batch`` sequences with ``context`` cached tokens."""
        return self.attention.decode(batch, context)

    @property
    def batches(self) -> Array:
        """Numbers of chunks in one call; empty if calls of several were not measured."""
        return self.attention.batches if self.attention.together else np.empty(0)

    @property
    def wider(self) -> float:
        """How many times the FLOPs of a prompt's query one of a decode takes."""
        return self.attention.wider

    def added(self, chunk: Array) -> Array:
        """The time that each of several equal chunks adds: a row for each of :attr:`batches`."""
        return self.attention.added(chunk)

    def all_reduce(self, num_bytes: Array) -> Array:
        """One all-reduce: a captured batch by the graph's kernel, a larger one by the eager one; a
        fused one by TensorRT-LLM's, which vLLM calls for it. (Its table times the sum alone, so the
        norm stays; what follows has a kernel less.)"""
        time = captured = self._curve(self._captured).time_us(num_bytes)
        if "eager" in self._reduces:
            eager = np.maximum(self._curve("eager").time_us(num_bytes), captured)
            time = np.where(num_bytes <= self.captured_bytes, captured, eager)
        if self._fused is None:
            return time
        return np.where(num_bytes <= self._fused_bytes, self._fused.time_us(num_bytes), time)

    def send_recv(self, num_bytes: Array, scope: str) -> Array:
        """One message: no data, so latency and the link's bandwidth. Stacks send the residual, too:
        twice the hidden states (vLLM's and SGLang's tensors of a pipeline)."""
        link = self.device.intra_node if scope == "intra_node" else self.device.inter_node
        return sent_us(2 * num_bytes, link)

    @property
    def captured_bytes(self) -> float:
        """The message of the largest batch that runs as a CUDA graph."""
        return HALF * CAPTURED_TOKENS * self.model.hidden_size

    def provenance(self) -> dict[str, Provenance]:
        """The provenance of every op of a bundle."""
        found = {op: self._of_gemm(op) for op in self.model.gemms(self.tp)}
        found |= {kind: self._of_attention(kind) for kind in (PREFILL, DECODE)}
        floor = f"max({self.spec.floor_us} us, bytes / {HBM_SHARE} of HBM bandwidth) a kernel"
        for op in names(lambda op: op.streams is not None):
            fit = self.spec.kernels.get(self._elementwise(op))
            found[op] = Provenance(
                f"interpolated: elementwise kernels of {self._name(fit)}, by bytes"
                if fit
                else f"modelled: {floor}; floor {self.spec.floor_source}",
                _half_width(fit, "sizes") if fit else _ASSUMED_PCT,
            )
        for op, own in self._own.items():
            origin = self._measured_on if own.of_chip else Provenance
            found[op] = origin(*own.provenance())
        if self.tp > 1:
            fit = self.spec.kernels[f"{ALL_REDUCE}.{self._captured}.{self._ranks}"]
            both = " and eager" if "eager" in self._reduces else ""
            if self._fused is not None:
                both += f" (to {self._fused_bytes / 2**20:g} MiB trtllm's, with the addition)"
            mark = f"measured: {self._captured}{both} kernel of {self._name(fit)}"
            found[ALL_REDUCE] = self._measured_on(mark, _half_width(fit, "sizes"))
        for op, scope in SENDS.items():
            link = self.device.intra_node if scope == "intra_node" else self.device.inter_node
            mark = f"modelled: {SEND_LATENCY_US:g} us + bytes / {link.kind} (formula, no data)"
            found[op] = Provenance(mark, _ASSUMED_PCT)
        return found

    def _of_gemm(self, op: str) -> Provenance:
        shape, dtype = self.model.gemms(self.tp)[op], self._dtype(op)
        fit = self.spec.kernels[f"gemm.{dtype}"]
        lattice = self._gemm(op)
        if shape.n > lattice.n[-1] or shape.k > lattice.k[-1]:
            kind, how = "beyond", "beyond the measured (n, k), by work"
        elif lattice.measured(shape.n, shape.k):
            kind, how = "between", "between token counts"
        else:
            kind, how = "shapes", "between (n, k)"
        origin = fit.origin(kind == "between")
        tuned = self._others if dtype == self.kernels.dtype else ()
        others = f", or {' or '.join(tuned)}'s where faster" if tuned else ""
        mark = f"{origin}: {dtype} GEMM of {self._name(fit)}{others}, {how}"
        width = _half_width(fit, kind)
        mark += f"; instead of {fit.instead}" if fit.instead else ""
        if doubt := self._in_doubt(op, fit):
            width = round(float(np.hypot(width, _ASSUMED_PCT)), 2)
            mark = f"{mark.replace(origin, 'derived', 1)}{DOUBT}{doubt}"
        return self._measured_on(mark, width)

    def _in_doubt(self, op: str, fit: KernelFit) -> str:
        """Why the server may run another kernel than the table's; empty if nothing says so."""
        shape, dtype = self.model.gemms(self.tp)[op], self._dtype(op)
        if fit.unlike:
            told = f"the GEMMs of {self._name(fit)} are {fit.unlike}"
            tuned = " or ".join(self._others) if dtype == self.kernels.dtype else ""
            return f"{told}; those of {tuned} count where they are faster" if tuned else told
        one, bf16 = np.ones(1), self._lattices["bf16"]
        slower = self._choices(op).time_us(one, shape.n, shape.k) > bf16.time_us(
            one, shape.n, shape.k
        )
        eight = dtype in ("fp8", "fp8_block") and bool(slower[0])
        named = f"the GEMMs of {self._name(fit)} in {dtype} take longer than bf16's for one token"
        return f"{named}, so its server may run another kernel" if eight else ""

    def _of_attention(self, op: str) -> Provenance:
        fit, where = self.attention.measured(op)
        less = LESS in fit.version
        origin = "derived" if less else fit.origin(not where)
        mark = f"{self._name(fit)}, KV cache {self.kernels.kv_cache_dtype}{_AMONG[where]}"
        width, prefixes = _half_width(fit, "sizes", where), self.attention.prefixes
        if op == PREFILL and self.model.indexer is not None:
            mark += "; by a law of its blocks"
        elif op == PREFILL:
            mark += f"; chunks after a prefix {'measured' if prefixes else 'composed'}"
            mark += "; several in one call measured" if self.attention.together else ""
            width = max(width, _half_width(prefixes, "sizes") if prefixes else _COMPOSED_PCT)
        width += _DERIVED_PCT if less else 0.0
        if op == PREFILL and self.attention.prompts_as_trtllm:
            origin, width = "derived", max(width, AS_TRTLLM_PCT)
            mark += "; or as trtllm's where faster (multi-head attention)"
        if self.attention.composes_windows:
            width = max(width, _WINDOWED_PCT)
        if (state := self.attention.state) is not None:
            fit, where = state.measured(op)
            own = fit.origin(not where)
            origin, how = max(origin, own, key=KINDS.index), f"{own} {fit.version}{_AMONG[where]}"
            width = max(width, _half_width(fit, "sizes", where))
            if state.borrowed:
                how = f"as {fit.version}'s gated delta nets of as many numbers (assumed)"
                origin, width = "derived", max(width, _OTHER_STATE_PCT)
            layers = f"{len(self.model.kinds['recurrent'])} of {self.model.num_layers} layers"
            mark += f"; {layers} recurrent, {how}"
        return self._measured_on(f"{origin}: {mark}{self.attention.about_windows}", width)

    def _name(self, fit: KernelFit) -> str:
        return f"{self.kernels.stack} {fit.version}"

    def _as_on(self, time_us: Array, num_bytes: Array) -> Array:
        """Times of the device with the same chip, where this one's memory is slower. Not faster
        than the bytes moved at 0.8 of its bandwidth, nor slower than by the ratio of the
        bandwidths."""
        if self.device.same_chip is None:
            return time_us
        own = self.device.memory_bandwidth
        slower = load_device(self.device.same_chip).memory_bandwidth / own
        return np.maximum(time_us, np.minimum(slower * time_us, 1e6 * num_bytes / HBM_SHARE / own))

    def _measured_on(self, mark: str, width: float) -> Provenance:
        """Provenance of a kernel of the tables, or one derived from them."""
        if self.device.same_chip is None:
            return Provenance(mark, width)
        derived = f"derived: from {self.device.same_chip} by memory bandwidth; {mark}"
        return Provenance(derived, round(width + _DERIVED_PCT, 2))

    def _dtype(self, op: str) -> str:
        return self.kernels.dtype if OPS[op].split else "bf16"

    @cached_property
    def _lattices(self) -> dict[str, GemmLattice]:
        dtypes = {self.kernels.dtype, "bf16"}
        return {d: GemmLattice.from_arrays(stored(self._arrays, f"gemm.{d}")) for d in dtypes}

    def _gemm(self, op: str) -> GemmLattice:
        return self._lattices[self._dtype(op)]

    def _elementwise(self, op: str) -> str:
        return f"elementwise.{op}"

    def _choices(self, op: str) -> FastestGemm:
        """The kernels among which the stack chooses; the fastest counts."""
        tuned = self._others.values() if self._dtype(op) == self.kernels.dtype else ()
        return FastestGemm([self._gemm(op), *tuned])

    @cached_property
    def _others(self) -> dict[str, GemmLattice]:
        """The other stacks' GEMMs of this dtype among which the stack chooses."""
        found = gemms_beside(self.device.name, self.kernels.named, self.kernels.dtype)
        return {stack: GemmLattice.from_arrays(arrays) for stack, arrays in found.items()}

    @cached_property
    def _reduces(self) -> set[str]:
        pairs = (name.split(".") for name in self.spec.having(ALL_REDUCE))
        return {kernel for kernel, gpus in pairs if gpus == str(self._ranks)}

    @cached_property
    def _fused(self) -> ReduceCurve | None:
        """TensorRT-LLM's all-reduces, where the stack fuses them with what follows."""
        table = f"{ALL_REDUCE}.graph.{self._ranks}"
        if not self.kernels.fused_all_reduce_mb or not 1 < self.tp <= self._ranks:
            return None
        found = tables_beside(self.device.name, self.kernels.stack, table).get("trtllm")
        return ReduceCurve.from_arrays(found) if found else None

    @property
    def _fused_bytes(self) -> float:
        """The largest message of a fused all-reduce; 0 if there is none."""
        return 0.0 if self._fused is None else 2**20 * self.kernels.fused_all_reduce_mb

    @property
    def _ranks(self) -> int:
        """The GPUs of the all-reduce's table: between nodes, which have none, those of a node."""
        return min(self.tp, self.device.gpus_per_node)

    @property
    def _captured(self) -> str:
        return "graph" if "graph" in self._reduces else "nccl"

    def _curve(self, kernel: str) -> ReduceCurve:
        return ReduceCurve.from_arrays(stored(self._arrays, f"{ALL_REDUCE}.{kernel}.{self._ranks}"))


def _half_width(fit: KernelFit, *kinds: str) -> float:
    """The widest of these kinds of hold-out; an empty name is none."""
    return max(fit.half_width_pct(kind, _ASSUMED_PCT) for kind in kinds if kind)
