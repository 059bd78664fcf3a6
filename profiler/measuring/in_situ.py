"""A profile bundle measured in the running engine, between the engine's other work.

All stages are kept busy with synthetic micro-batches, as in serving. The time of a layer beyond its
GEMMs and attention is ``others``. The time of a stage beyond its layers is ``embedding`` (first
stage) and ``lm_head`` (last stage). So the parts add up to the engine's time. No torch.
"""

from __future__ import annotations

from datetime import date
from statistics import median

import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle, BundleMeta
from sarathi_sim.profiler.engine.processes import StageLog
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.engine.work import TIMED_OPS
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, EDGE_OPS, OPS, OTHERS, PREFILL
from sarathi_sim.profiler.measuring.to_bundle import tables_of
from sarathi_sim.profiler.planning.designed import MIXED, SKEWED, skewed_contexts
from sarathi_sim.profiler.planning.grid import Key
from sarathi_sim.profiler.planning.journal import Timing, relative_iqr

GridWork = tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]
_LAYERS, _HEAD = len(TIMED_OPS), len(TIMED_OPS) + 1


def grid_works(max_batch: int, chunks: list[int], whole: list[int], longest: int) -> list[GridWork]:
    """Micro-batches that cover those of a workload.

    Decodes alone: every number up to ``max_batch``, at three contexts up to ``longest``, and some
    with unequal ones. Chunks alone: those of ``chunks`` with and without context, those of
    ``whole`` without. Both: the largest of each with few and many decodes.
    """
    mean = longest // 2
    works: list[GridWork] = [
        ([], _decodes([context] * batch))
        for batch in range(1, max_batch + 1)
        for context in (longest // 8, mean, longest - 1)
    ]
    works += [
        ([], _decodes(skewed_contexts(batch, mean, most)))
        for batch in (max_batch // 2, max_batch)
        for most in (5 * mean // 4, 7 * mean // 4)
        if most <= batch * mean
    ]
    for tokens in sorted({*chunks, *whole}):
        before = [0]
        if tokens in chunks:
            before += [c for c in (longest // 4, longest // 2) if c + tokens <= longest]
        works += [([(0, tokens, context, 1)], []) for context in before]
    return works + [
        ([(0, tokens, 0, 1)], _decodes([mean] * piggybacked))
        for tokens in sorted({max(chunks, default=1), max(whole, default=1)})
        for piggybacked in sorted({max_batch // 2, max_batch - 1} - {0})
    ]


def _decodes(contexts: list[int]) -> list[tuple[int, int]]:
    """In slots of their own; slot 0 is the chunk's."""
    return [(slot, context) for slot, context in enumerate(contexts, start=1)]


def in_situ_bundle(
    spec: EngineSpec, works: list[GridWork], log: StageLog, send_s: float, device: str
) -> Bundle:
    """The bundle of a played grid; ``works`` may hold each micro-batch several times, which gives a
    median and a spread.

    ``send_s`` is what a transfer between two stages takes, whatever its size.
    """
    # One layer of an op: the stages' sums, over all their layers.
    per_layer = log.ops[:, :, : _LAYERS + 1].sum(axis=1) / sum(spec.layers)
    service = log.finish - log.start
    first = service[:, 0] - log.ops[:, 0, _LAYERS]
    last = log.ops[:, -1, _HEAD]
    if spec.pp == 1:
        first = first - last
    else:
        last = service[:, -1] - log.ops[:, -1, _LAYERS]
    seconds = dict(zip((*TIMED_OPS, MIXED), per_layer.T, strict=True))
    seconds[SKEWED] = seconds[DECODE]
    seconds[ALL_REDUCE] = seconds[ALL_REDUCE] / OPS[ALL_REDUCE].calls
    seconds[OTHERS] = per_layer[:, _LAYERS] - per_layer[:, :_LAYERS].sum(axis=1)
    seconds |= dict(zip(EDGE_OPS, (first, last), strict=True))
    samples: dict[str, dict[Key, list[float]]] = {}
    for number, work in enumerate(works):
        for op, key in _keys(spec, *work).items():
            # A remainder that noise made negative is no time; a bundle's times are positive.
            time_us = max(1e6 * float(seconds[op][number]), 0.1)
            samples.setdefault(op, {}).setdefault(key, []).append(time_us)
    points = {
        op: {key: Timing(median(times), relative_iqr(times)) for key, times in found.items()}
        for op, found in samples.items()
    }
    send = pd.DataFrame(
        {"num_bytes": [1, 2**30], "scope": "intra_node", "time_us": max(send_s * 1e6, 0.1)}
    )
    meta = BundleMeta(
        device=device,
        model=spec.model.name,
        model_spec=spec.model,
        tp=spec.tp,
        source="measured",
        created=date.today().isoformat(),
        generator="sarathi-sim validate",
        dtype=spec.dtype,
        num_layers_profiled=sum(spec.layers),
        notes="measured in the running engine; edge ops hold all that a stage does beside layers",
    )
    return Bundle(meta, **tables_of(points) | {"send_recv": send})


def _keys(
    spec: EngineSpec, chunks: list[tuple[int, int, int, int]], decodes: list[tuple[int, int]]
) -> dict[str, Key]:
    """What a work tells of each op: of its size for ops by rows; of attention where it has chunks
    or decodes alone (those of unequal contexts apart); of whole layers where it has both."""
    contexts = [context for _, context in decodes]
    tokens, outputs = sum(c[1] for c in chunks) + len(decodes), len(chunks) + len(decodes)
    keys: dict[str, Key] = {
        op: (outputs if OPS[op].outputs else tokens,) for op in spec.model.row_ops
    }
    if spec.tp > 1:
        size = 4 if spec.dtype == "float32" else 2
        keys[ALL_REDUCE] = (tokens * spec.model.hidden_size * size,)
    if chunks and decodes:
        keys[MIXED] = (*chunks[0][1:3], len(contexts), contexts[0])
    elif chunks:
        keys[PREFILL] = chunks[0][1:3]
    elif len(set(contexts)) == 1:
        keys[DECODE] = (len(contexts), contexts[0])
    else:
        keys[SKEWED] = (len(contexts), round(sum(contexts) / len(contexts)), max(contexts))
    return keys
