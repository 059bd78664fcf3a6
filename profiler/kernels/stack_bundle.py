"""A profile bundle from a stack's kernels."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle, BundleMeta, KernelOrigin
from sarathi_sim.profiler.facts.attention_kinds import mean_layer
from sarathi_sim.profiler.facts.device import device_sha256
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import ALL_TO_ALL, PREFILL
from sarathi_sim.profiler.kernels.stack_file import Arrays, StackSpec, stack_sha256, surfaces_sha256
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.modelled import TILE, SampledSizes, rounded_us, sampled

#: Contexts to sample: the kernels' times change their slope between powers of two.
_MOST_CONTEXT, _LEAST_CONTEXT = 131072, 8192
_CONTEXTS = frozenset({1, 8, 24, 32, 48, 96, 192, 384})


def make_stack_bundle(
    device: str,
    model: ModelSpec,
    tp: int,
    kernels: Kernels,
    max_tokens: int = 131072,
    fitted: tuple[StackSpec, Arrays] | None = None,
) -> Bundle:
    """Op times of one layer of one ``tp`` rank of ``model`` with a stack's kernels on ``device``.

    ``meta.environment`` has the origin of every op. The same files give the same bundle. ``fitted``
    are other surfaces than the shipped ones.
    Raises SpecError for what was not measured, ValueError for a tp that does not fit the model.
    """
    model.check_tp(tp)
    times = StackTimes(device, kernels, model, tp, fitted)
    origins = times.provenance()
    meta = BundleMeta(
        device=times.device.name,
        model=model.name,
        model_spec=model,
        tp=tp,
        source="modelled",
        created=times.spec.date,
        generator="sarathi-sim make-bundle",
        dtype="bfloat16",
        tile=TILE,
        notes="fitted to public kernel measurements; errors are in data/kernels",
        environment={
            "repository": times.spec.origin,
            "licence": times.spec.licence,
            **{op: origin.mark for op, origin in origins.items()},
        },
        device_file_sha256=device_sha256(times.device.name),
        kernels=KernelOrigin(
            used=kernels,
            sha256=surfaces_sha256(fitted[1]) if fitted else stack_sha256(device, kernels.stack),
            half_width_pct={op: origin.half_width_pct for op, origin in origins.items()},
        ),
    )
    longest = min(max(model.max_position_embeddings, _LEAST_CONTEXT), _MOST_CONTEXT)
    edge = int(times.captured_bytes)
    grid = SampledSizes(
        max_tokens,
        longest,
        contexts=_CONTEXTS,
        messages=frozenset({edge, edge + 1024}),
        also=(ALL_TO_ALL,) if times.exchanges else (),
    )
    tables = sampled(times, model, tp, grid)
    if times.attention.together:
        tables["attn_prefill_added"] = _added(times, tables[PREFILL]["chunk_tokens"])
    return Bundle(meta=meta, **tables).identified()


def _added(times: StackTimes, chunks: pd.Series[int]) -> pd.DataFrame:
    """What each of several equal chunks in one call adds, in a mean layer."""
    chunk, attention, model = np.unique(chunks).astype(np.float64), times.attention, times.model
    time = mean_layer(
        model.windows,
        model.num_layers,
        attention.added(chunk),
        lambda window: attention.added_within(chunk),
    )
    batch, size = (a.ravel() for a in np.meshgrid(attention.batches, chunk, indexing="ij"))
    sizes = {"batch_size": batch.astype(int), "chunk_tokens": size.astype(int)}
    return pd.DataFrame({**sizes, "time_us": rounded_us(time.ravel())})
