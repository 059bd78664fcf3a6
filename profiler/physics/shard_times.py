"""Op times without a profile, at any size: from a stack's tables or from a calibrated device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..bundle.schema import Bundle, BundleMeta
from ..bundle.tables import TABLES, empty_table
from ..facts.device import DeviceSpec, device_files, device_sha256, load_device
from ..facts.model import ModelSpec
from ..facts.ops import (
    ALL_REDUCE,
    ATTENTION,
    DECODE,
    OPS,
    PREFILL,
    SENDS,
    GemmShape,
)
from ..facts.roofline import KEY_BLOCK, Array, attended, attended_within
from ..storage.strict import SpecError
from .fit import OpModel
from .forms import (
    ATTN_CONTEXT,
    ATTN_PREFILL,
    GEMM,
    LINK,
    STREAM,
    Form,
    decode_form,
)
from .residual import residual_from_arrays

TILE = 128
#: The longest context of the measurements behind the device models.
_DEVICE_CONTEXT = 8192
#: Additional keys per row of queries with a window, because kernels mask whole blocks of queries
#: and keys. Fitted to vLLM's and TensorRT-LLM's rows with windows of 128 and 1,024.
_WINDOW_EDGE = 600.0

DOUBT = "; in doubt: "


@dataclass(frozen=True)
class Provenance:
    """The origin of an op's times, and the half-width of their 90 % band in percent. ``mark``
    begins with one of :data:`KINDS` and a colon; the text after :data:`DOUBT` in it says why
    another kernel may run than the one that was timed."""

    mark: str
    half_width_pct: float

    @property
    def kind(self) -> str:
        """The kind of origin: the first word of ``mark``."""
        return self.mark.partition(":")[0]


#: From the most to the least direct: this very shape or head count; between those measured; the
#: same chip with other memory, or another chip of the same architecture; physics.
KINDS = ("measured", "interpolated", "derived", "modelled")


class ShardTimes(Protocol):
    """The times of the ops of one tensor-parallel rank of a model, in microseconds.

    Inputs are arrays of equal shape. ``added`` gives the time that each of several equal chunks
    adds to their call: a row for each of ``batches`` chunks (none if it was not measured). A query
    of a decode takes ``wider`` times the FLOPs of a prompt's at the same context. ``meta`` holds
    the origin of the times, and identifies them; up to ``longest_context`` cached tokens they are
    supported by measurements.
    """

    model: ModelSpec
    tp: int

    @property
    def longest_context(self) -> int: ...

    @property
    def meta(self) -> BundleMeta: ...

    @property
    def batches(self) -> Array: ...

    @property
    def wider(self) -> float: ...

    def by_rows(self, op: str, tokens: Array) -> Array:
        """An op by token rows."""

    def prefill(self, chunk: Array, context: Array) -> Array:
        """Attention of one sequence's chunk after ``context`` cached tokens, in a mean layer."""

    def decode(self, batch: Array, context: Array) -> Array:
        """Attention of one token for each of ``batch`` sequences with ``context`` cached tokens."""

    def added(self, chunk: Array) -> Array:
        """The time that each of several equal chunks adds to a call: shape (batches, chunks)."""

    def all_reduce(self, num_bytes: Array) -> Array:
        """One all-reduce of ``num_bytes`` on each rank."""

    def send_recv(self, num_bytes: Array, scope: str) -> Array:
        """One message over a link."""

    def provenance(self) -> dict[str, Provenance]:
        """The provenance of every op."""


def composed_prefill(
    time: Callable[[Array, Array], Array], chunk: Array, context: Array, window: int
) -> Array:
    """The time of a chunk in a layer with a window: its ``time`` by (chunk, context) without a
    window, times the share of query-key pairs within the window."""
    near = np.minimum(context, window)
    left = attended_within(chunk, context, window, _WINDOW_EDGE)
    share = left / attended(chunk, near, 0.5, KEY_BLOCK)[1]
    return np.asarray(time(chunk, near) * np.minimum(share, 1.0))


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


class DeviceModel:
    """Op times in microseconds of a shipped device with fits, from its YAML and ``.npz``. Inputs
    are arrays of equal length, or numbers; ``heads`` are one rank's (query heads, KV heads, numbers
    a head). Raises SpecError for a device or an op without a fit."""

    def __init__(self, device: str) -> None:
        self.spec: DeviceSpec = load_device(device)
        self.spec.op("gemm")
        self._ops: dict[str, OpModel] = {}

    def gemm(self, tokens: Array, shape: GemmShape) -> Array:
        """One GEMM of ``tokens`` rows."""
        return self.predict("gemm", m=tokens, n=shape.n, k=shape.k)

    def attn_prefill(self, chunk: Array, context: Array, *heads: int) -> Array:
        """One sequence's chunk after ``context`` cached tokens, in a layer without a window."""
        of = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
        if "attn_context" not in (self.spec.fitted or {}):
            return self.predict("attn_prefill", chunk=chunk, context=context, batch=1, **of)
        fresh = self.predict("attn_prefill", chunk=chunk, context=0, batch=1, **of)
        cached = np.maximum(context, 1)
        after = self.predict("attn_context", chunk=chunk, context=cached, base_us=fresh, **of)
        return np.where(context > 0, after, fresh)

    def attn_decode(self, batch: Array, context: Array, *heads: int) -> Array:
        """One token for each of ``batch`` sequences with ``context`` cached tokens."""
        of = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
        op = "attn_decode"
        if op not in (self.spec.fitted or {}):
            op += "_mha" if of["heads"] == of["kv_heads"] else "_gqa"
        return self.predict(op, batch=batch, context=context, **of)

    def predict(self, op: str, **inputs: Array | float) -> Array:
        """A fitted op by the inputs of its form."""
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


class DeviceTimes(DeviceModel):
    """Op times of one ``tp`` rank of ``model`` on a calibrated device: :class:`ShardTimes`. Raises
    SpecError for a device without fits or latent attention, ValueError for a tp that does not fit
    the model or the node."""

    longest_context = _DEVICE_CONTEXT
    batches = np.empty(0)
    wider = 1.0

    def __init__(self, device: str, model: ModelSpec, tp: int) -> None:
        super().__init__(device)
        self.model, self.tp = model, tp
        if tp > 1 and f"all_reduce_{tp}" not in (self.spec.fitted or {}):
            raise ValueError(
                f"device {device}: no all-reduce was fitted for tp {tp}; allowed: 1, 2, 4, 8"
            )
        model.check_tp(tp)
        self._origins = self._provenance()

    @property
    def meta(self) -> BundleMeta:
        """The origin of the times; the same device files give the same."""
        spec, files = self.spec, device_sha256(self.spec.name)
        return BundleMeta(
            device=spec.name,
            model=self.model.name,
            model_spec=self.model,
            tp=self.tp,
            source="modelled",
            created=max(fit.date for fit in (spec.fitted or {}).values()),  # of the fit
            generator="device model",
            tile=TILE,
            device_file_sha256=files,
            notes="the fitted device model; its held-out errors are in the device file",
            content_sha256=identity(files, self.model, self.tp),
        )

    def by_rows(self, op: str, tokens: Array) -> Array:
        found, shard = OPS[op], self.model.shard(self.tp)
        if found.shape is not None:
            return self.gemm(tokens, found.shape(shard))
        if found.streams is None:
            raise SpecError(f"op {op}: the registry says neither its shape nor what it moves")
        return sum(
            (
                s.times * self.predict(s.kernel, num_bytes=2.0 * tokens * s.numbers)
                for s in found.streams(shard)
            ),
            np.zeros(np.shape(tokens)),
        )

    def prefill(self, chunk: Array, context: Array) -> Array:
        def whole(size: Array, held: Array) -> Array:
            return self.attn_prefill(size, held, *self._heads)

        return self.model.mean_layer(
            whole(chunk, context), lambda window: composed_prefill(whole, chunk, context, window)
        )

    def decode(self, batch: Array, context: Array) -> Array:
        def seen(window: float) -> Array:
            return self.attn_decode(batch, np.minimum(context, window), *self._heads)

        return self.model.mean_layer(seen(np.inf), seen)

    def added(self, chunk: Array) -> Array:
        return np.empty((0, len(chunk)))

    def all_reduce(self, num_bytes: Array) -> Array:
        return self.predict(f"all_reduce_{self.tp}", num_bytes=num_bytes)

    def send_recv(self, num_bytes: Array, scope: str) -> Array:
        return self.predict(f"send_recv_{scope}", num_bytes=num_bytes)

    def provenance(self) -> dict[str, Provenance]:
        return self._origins

    def _provenance(self) -> dict[str, Provenance]:
        found, reduce = {}, (ALL_REDUCE,) if self.tp > 1 else ()
        for op in (*self.model.row_ops, *ATTENTION, *reduce, *SENDS):
            behind = self.spec.behind(op, self.tp)
            if not behind:
                raise SpecError(f"device {self.spec.name}: op {op!r} has no fit")
            width = float(np.mean([fit.half_width_pct for fit in behind]))
            found[op] = Provenance(f"modelled: fitted to {behind[0].source}", round(width, 2))
        return found

    @property
    def _heads(self) -> tuple[int, int, int]:
        for what in ("latent", "recurrent"):
            if getattr(self.model, what) is not None:
                kind = {"latent": "latent attention", "recurrent": "recurrent layers"}[what]
                raise SpecError(
                    f"{self.model.name}: no device model knows {kind}; name a stack whose kernels "
                    "were measured (sarathi-sim list devices)"
                )
        return (*self.model.heads_per_rank(self.tp), self.model.head_dim)


def identity(*what: object) -> str:
    """The hash of the inputs of op times."""
    return hashlib.sha256(repr(what).encode()).hexdigest()


def asked_at(times: ShardTimes, sizes: Bundle) -> Bundle:
    """The bundle of these times at the sizes of another bundle's ops, transfers and attention."""

    def timed(rows: pd.DataFrame, time_us: Callable[..., Array], *keys: str) -> pd.DataFrame:
        rows = rows.drop(columns=[name for name in rows if name in _MEASURED])
        asked = time_us(*(rows[key].to_numpy(np.float64) for key in keys))
        return rows.assign(time_us=rounded_us(asked))

    none = empty_table(TABLES[ALL_REDUCE])
    linear = [
        timed(rows, partial(times.by_rows, str(op)), "num_tokens")
        for op, rows in sizes.linear.groupby("op")
    ]
    messages = [
        timed(rows, partial(times.send_recv, scope=str(scope)), "num_bytes")
        for scope, rows in sizes.send_recv.groupby("scope")
    ]
    return Bundle(
        times.meta,
        pd.concat(linear, ignore_index=True),
        timed(sizes.attn_prefill, times.prefill, *TABLES[PREFILL].key),
        timed(sizes.attn_decode, times.decode, *TABLES[DECODE].key),
        timed(sizes.all_reduce, times.all_reduce, "num_bytes") if times.tp > 1 else none,
        pd.concat(messages, ignore_index=True) if messages else sizes.send_recv,
    )


#: Columns of measured bundles only.
_MEASURED = ("time_us", *TABLES[PREFILL].extras)


def rounded_us(times_us: Array) -> Array:
    """Round to six digits: more than the precision, the same text on every machine."""
    return np.array([float(f"{t:.6g}") for t in times_us])
