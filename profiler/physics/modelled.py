"""A profile bundle without a GPU: a calibrated device model, sampled at useful sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle, BundleMeta
from sarathi_sim.profiler.facts.device import device_sha256
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import OPS, SCOPES
from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.physics.layer_mix import mean_time
from sarathi_sim.profiler.physics.op_times import DeviceModel

TILE = 128
#: LM-head rows: one a sequence, unless a whole prompt's logits are wanted.
_MAX_LOGIT_ROWS = 4096
#: Chunks and contexts of models with long ones; as many again in the octave between.
_FAR = {2**i * half // 2 for i in range(13, 18) for half in (2, 3)}
#: Decodes' contexts beside the usual ones: a calibrated kernel's times step past each block of 32
#: keys (A6000, flash-attn), by a third at 33 tokens.
_NEAR = frozenset({1, 8, *range(32, 257, 32), *range(33, 258, 32)})


class ShardTimes(Protocol):
    """What says how long each op of a shard takes, in microseconds."""

    def by_rows(self, op: str, tokens: Array, model: ModelSpec, tp: int) -> Array:
        """An op of ``linear.csv`` on ``tokens`` rows."""

    def attn_prefill(self, chunk: Array, context: Array, model: ModelSpec, tp: int) -> Array:
        """One sequence's chunk after ``context`` cached tokens."""

    def attn_decode(self, batch: Array, context: Array, model: ModelSpec, tp: int) -> Array:
        """One token for each of ``batch`` sequences with ``context`` cached tokens."""

    def prefill_within(self, chunk: Array, context: Array, model: ModelSpec, tp: int) -> Array:
        """A chunk in a layer with the model's window."""

    def decode_within(self, batch: Array, context: Array, model: ModelSpec, tp: int) -> Array:
        """Decodes in a layer with the model's window."""

    def all_reduce(self, num_bytes: Array, gpus: int) -> Array:
        """One all-reduce of ``num_bytes`` on each of ``gpus`` ranks."""

    def send_recv(self, num_bytes: Array, scope: str) -> Array:
        """One message over a link."""


@dataclass(frozen=True)
class SampledSizes:
    """What to sample: tokens of a batch, chunk and cached tokens of a sequence up to these.

    ``contexts`` (of decodes) and ``messages`` (bytes) are sampled beside the usual ones, and the
    ops ``also`` by rows beside the model's.
    """

    max_tokens: int
    max_context: int
    contexts: frozenset[int] = frozenset()
    messages: frozenset[int] = frozenset()
    also: tuple[str, ...] = ()


def make_bundle(
    device: str,
    model: ModelSpec,
    tp: int,
    max_tokens: int = 131072,
    max_context: int = 8192,
) -> Bundle:
    """Op times of one layer of one ``tp`` rank of ``model`` on a shipped device with fits.

    ``max_tokens`` bounds the tokens of a batch, ``max_context`` chunk and cached tokens of a
    sequence. The same device files give the same bundle, to the byte. Raises SpecError for a
    device without fits, ValueError for a tp that does not fit the model or the node.
    """
    times = device_model(device, model, tp)
    fits = times.spec.fitted or {}
    meta = BundleMeta(
        device=times.spec.name,
        model=model.name,
        model_spec=model,
        tp=tp,
        source="modelled",
        # The date of the fit, not of this call: regenerating must give the same bytes.
        created=max(fit.date for fit in fits.values()),
        generator="sarathi-sim make-bundle",
        tile=TILE,
        device_file_sha256=device_sha256(times.spec.name),
        notes="predicted by the fitted device model; its held-out errors are in the device file",
    )
    return Bundle(
        meta=meta, **sampled(times, model, tp, SampledSizes(max_tokens, max_context, _NEAR))
    )


def device_model(device: str, model: ModelSpec, tp: int) -> DeviceModel:
    """The device's times, if it has those of ``tp`` ranks of ``model``; raises as
    :func:`make_bundle` does."""
    times = DeviceModel(device)
    if tp > 1 and f"all_reduce_{tp}" not in (times.spec.fitted or {}):
        raise ValueError(
            f"device {device}: no all-reduce was fitted for tp {tp}; allowed: 1, 2, 4, 8"
        )
    model.check_tp(tp)
    times.provenance(model, tp)
    return times


def sampled(
    times: ShardTimes, model: ModelSpec, tp: int, grid: SampledSizes
) -> dict[str, pd.DataFrame]:
    """The tables of a bundle by name."""
    return {
        "linear": _linear(times, model, tp, grid),
        "attn_prefill": _prefill(times, model, tp, grid.max_context),
        "attn_decode": _decode(times, model, tp, grid),
        "all_reduce": _all_reduce(times, tp, grid),
        "send_recv": _send_recv(times),
    }


def token_grid(most: int) -> Array:
    """Token counts to sample up to ``most``.

    Every one to 64, every 8 to 512 and 32 to 1024, both sides of every half tile to 4096, then ever
    coarser, where times are all but linear.
    """
    counts = {*range(1, 65), *range(64, 513, 8), *range(512, 1025, 32)}
    for edge in range(TILE // 2, 4097, TILE // 2):
        counts |= {edge, edge + 1}
    counts |= set(range(4096, 8193, 512)) | set(range(8192, 32769, 2048))
    counts |= {32768 * 2**i + half for i in range(12) for half in (0, 16384 * 2**i)}
    return _upto(counts, most)


def _upto(values: Iterable[int], most: int) -> Array:
    """The values up to ``most``, and ``most`` itself."""
    return np.array(sorted({v for v in values if v < most} | {most}), dtype=np.float64)


def rounded_us(times_us: Array) -> Array:
    """Round to six digits: more than the precision, fewer bytes, the same text on every machine."""
    return np.array([float(f"{t:.6g}") for t in times_us])


def _linear(times: ShardTimes, model: ModelSpec, tp: int, grid: SampledSizes) -> pd.DataFrame:
    parts, most = [], grid.max_tokens
    for op in sorted((*model.row_ops, *grid.also)):
        rows = token_grid(min(most, _MAX_LOGIT_ROWS) if OPS[op].outputs else most)
        time_us = rounded_us(times.by_rows(op, rows, model, tp))
        parts.append(pd.DataFrame({"op": op, "num_tokens": rows.astype(int), "time_us": time_us}))
    return pd.concat(parts, ignore_index=True)


def _pairs(first: Array, second: Array) -> tuple[Array, Array]:
    a, b = np.meshgrid(first, second, indexing="ij")
    return a.ravel(), b.ravel()


def _prefill(times: ShardTimes, model: ModelSpec, tp: int, most: int) -> pd.DataFrame:
    # Both sides of the kernels' row blocks (64 and 128); in the context, of having one at all.
    edges = {*range(64, 1025, 64), *range(1152, 2049, 128)}
    chunks = {1, 16, 32, 48, 96, 160, 224, 3072, 4096, 6144} | edges | {e + 1 for e in edges}
    contexts = {0, 1, 128, 256, 512, 1024, 2048, 3072, 4096, 6144} | _FAR
    chunk, context = _pairs(_upto(chunks | _FAR, most), _upto(contexts, most))
    time = mean_time(times.attn_prefill, times.prefill_within, chunk, context, model, tp)
    columns = {"chunk_tokens": chunk.astype(int), "context_tokens": context.astype(int)}
    return pd.DataFrame({**columns, "time_us": rounded_us(time)})


def _decode(times: ShardTimes, model: ModelSpec, tp: int, grid: SampledSizes) -> pd.DataFrame:
    batches = {*range(1, 33), 40, 48, 56, 64, 80, 96, 128, 192, 256, 384}
    contexts = {16, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144} | _FAR
    every = _upto(contexts | grid.contexts, grid.max_context)
    batch, context = _pairs(_upto(batches, 512), every)
    time = mean_time(times.attn_decode, times.decode_within, batch, context, model, tp)
    columns = {"batch_size": batch.astype(int), "context_tokens": context.astype(int)}
    return pd.DataFrame({**columns, "time_us": rounded_us(time)})


def _message_sizes() -> Array:
    """1 KiB to 4 GiB, two sizes an octave."""
    return np.array([2**i * half // 2 for i in range(10, 33) for half in (2, 3)][:-1], dtype=float)


def _all_reduce(times: ShardTimes, tp: int, grid: SampledSizes) -> pd.DataFrame:
    if tp == 1:
        return pd.DataFrame({"num_bytes": np.array([], dtype=int), "time_us": np.array([])})
    sizes = np.union1d(_message_sizes(), list(grid.messages))
    time = rounded_us(times.all_reduce(sizes, tp))
    return pd.DataFrame({"num_bytes": sizes.astype(int), "time_us": time})


def _send_recv(times: ShardTimes) -> pd.DataFrame:
    sizes = _message_sizes()
    parts = [
        pd.DataFrame(
            {
                "num_bytes": sizes.astype(int),
                "scope": scope,
                "time_us": rounded_us(times.send_recv(sizes, scope)),
            }
        )
        for scope in sorted(SCOPES)
    ]
    return pd.concat(parts, ignore_index=True)
