"""A calibrated device model: the time of any op of any transformer shard, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.device import DeviceSpec, device_files, load_device
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ATTENTION, OPS, SENDS, GemmShape
from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.physics.fit import OpModel
from sarathi_sim.profiler.physics.forms import (
    ATTN_CONTEXT,
    ATTN_PREFILL,
    GEMM,
    LINK,
    STREAM,
    Form,
    decode_form,
)
from sarathi_sim.profiler.physics.layer_mix import composed_decode, composed_prefill
from sarathi_sim.profiler.physics.residual import residual_from_arrays
from sarathi_sim.profiler.storage.strict import SpecError

_FORMS: dict[str, Form] = {
    "gemm": GEMM,
    "attn_prefill": ATTN_PREFILL,
    "attn_context": ATTN_CONTEXT,
    **dict.fromkeys(("norm", "layer_norm", "rope", "act", "act_plain", "add", "embedding"), STREAM),
}
# The switches of a fitted decode op are among its constants, so any decode form will do here.
_DECODE = decode_form(splits=False, packed=True)


def _form(op: str) -> Form:
    if op.startswith("attn_decode"):
        return _DECODE
    return _FORMS.get(op, LINK)


DOUBT = "; in doubt: "


@dataclass(frozen=True)
class Provenance:
    """The origin of an op's times, and the half-width of their 90 % band in percent.

    ``mark`` begins with one of :data:`KINDS` and a colon; what follows :data:`DOUBT` in it says why
    the times may be another kernel's.
    """

    mark: str
    half_width_pct: float

    @property
    def kind(self) -> str:
        """Its first word."""
        return self.mark.partition(":")[0]


#: From the most to the least direct: this very shape or head count; between those measured; the
#: same chip with other memory; physics.
KINDS = ("measured", "interpolated", "derived", "modelled")


class DeviceModel:
    """Op times in microseconds of a shipped device with fits, from its YAML and ``.npz``.

    Inputs are arrays of equal length, or numbers. Raises SpecError for a device or an op without a
    fit.
    """

    def __init__(self, device: str) -> None:
        self.spec: DeviceSpec = load_device(device)
        self.spec.op("gemm")
        self._ops: dict[str, OpModel] = {}

    def gemm(self, tokens: Array, shape: GemmShape) -> Array:
        """One GEMM of ``tokens`` rows."""
        return self._predict("gemm", m=tokens, n=shape.n, k=shape.k)

    def attn_prefill(self, chunk: Array, context: Array, model: ModelSpec, tp: int) -> Array:
        """One sequence's chunk after ``context`` cached tokens, one layer of one rank."""
        heads = self._heads(model, tp)
        if "attn_context" not in (self.spec.fitted or {}):
            return self._predict("attn_prefill", chunk=chunk, context=context, batch=1, **heads)
        fresh = self._predict("attn_prefill", chunk=chunk, context=0, batch=1, **heads)
        after = self._predict(
            "attn_context", chunk=chunk, context=np.maximum(context, 1), base_us=fresh, **heads
        )
        return np.where(context > 0, after, fresh)

    def attn_decode(self, batch: Array, context: Array, model: ModelSpec, tp: int) -> Array:
        """One token for each of ``batch`` sequences with ``context`` cached tokens."""
        heads = self._heads(model, tp)
        kind = "mha" if heads["heads"] == heads["kv_heads"] else "gqa"
        op = "attn_decode"
        if op not in (self.spec.fitted or {}):
            op = f"attn_decode_{kind}"
        return self._predict(op, batch=batch, context=context, **heads)

    def prefill_within(self, chunk: Array, context: Array, model: ModelSpec, tp: int) -> Array:
        """A chunk in a layer with the model's window."""
        return composed_prefill(self.attn_prefill, chunk, context, model, tp)

    def decode_within(self, batch: Array, context: Array, model: ModelSpec, tp: int) -> Array:
        """Decodes in a layer with the model's window."""
        return composed_decode(self.attn_decode, batch, context, model, tp)

    def by_rows(self, op: str, tokens: Array, model: ModelSpec, tp: int) -> Array:
        """An op of ``linear.csv`` on ``tokens`` rows: a GEMM, or elementwise kernels in turn."""
        found, shard = OPS[op], model.shard(tp)
        if found.shape is not None:
            return self.gemm(tokens, found.shape(shard))
        if found.streams is None:
            raise SpecError(f"op {op}: the registry says neither its shape nor what it moves")
        return sum(
            (s.times * self._stream(s.kernel, tokens, s.numbers) for s in found.streams(shard)),
            np.zeros(np.shape(tokens)),
        )

    def all_reduce(self, num_bytes: Array, gpus: int) -> Array:
        """One all-reduce of ``num_bytes`` on each of ``gpus`` ranks."""
        return self._predict(f"all_reduce_{gpus}", num_bytes=num_bytes)

    def send_recv(self, num_bytes: Array, scope: str) -> Array:
        """One message to a GPU of the same node (``intra_node``) or of another (``inter_node``)."""
        return self._predict(f"send_recv_{scope}", num_bytes=num_bytes)

    def provenance(self, model: ModelSpec, tp: int) -> dict[str, Provenance]:
        """Of every op of a bundle. Raises SpecError for one without a fit."""
        found = {}
        for op in (*model.row_ops, *ATTENTION, *((ALL_REDUCE,) if tp > 1 else ()), *SENDS):
            behind = self.spec.behind(op, tp)
            if not behind:
                raise SpecError(f"device {self.spec.name}: op {op!r} has no fit")
            width = float(np.mean([fit.half_width_pct for fit in behind]))
            found[op] = Provenance(f"modelled: fitted to {behind[0].source}", round(width, 2))
        return found

    # ------------------------------------------------------------------------------------------

    def _stream(self, op: str, tokens: Array, numbers_per_token: int) -> Array:
        return self._predict(op, num_bytes=2.0 * tokens * numbers_per_token)

    @staticmethod
    def _heads(model: ModelSpec, tp: int) -> dict[str, int]:
        if model.latent is not None:
            raise SpecError(
                f"{model.name}: no device model knows latent attention; name a stack whose kernels "
                "were measured (sarathi-sim devices)"
            )
        heads, kv_heads = model.heads_per_rank(tp)
        return {"heads": heads, "kv_heads": kv_heads, "head_dim": model.head_dim}

    def _predict(self, op: str, **inputs: Array | float) -> Array:
        if op not in self._ops:
            self._ops[op] = self._load(op)
        spec = self.spec
        hardware = {
            "peak_flops": spec.peak_flops,
            "bandwidth": spec.memory_bandwidth,
            "num_sms": float(spec.num_sms),
        }
        named = {**hardware, **inputs}
        arrays = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in named.values()))
        return self._ops[op].predict(dict(zip(named, arrays, strict=True)))

    def _load(self, op: str) -> OpModel:
        fitted = self.spec.op(op)
        if not fitted.residual:
            return OpModel(_form(op), fitted.constants, residual=None)
        prefix = f"{op}."
        mine = {k.removeprefix(prefix): v for k, v in self._arrays.items() if k.startswith(prefix)}
        return OpModel(_form(op), fitted.constants, residual_from_arrays(mine))

    @cached_property
    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        files = [path for path in device_files(self.spec.name) if path.suffix == ".npz"]
        if not files:
            raise SpecError(f"device {self.spec.name}: its .npz with the residuals is missing")
        with np.load(files[0], allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
