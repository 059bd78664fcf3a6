"""A profile bundle measured in the running engine, between the engine's other work.

All stages are kept busy with synthetic micro-batches, as in serving. The time of a layer beyond its
GEMMs and attention is ``others``. The time of a stage beyond its layers is ``embedding`` (first
stage) and ``lm_head`` (last stage). So the parts add up to the engine's time. No torch.
"""

from __future__ import annotations

from datetime import date

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle, BundleMeta
from sarathi_sim.profiler.bundle.tables import TABLES
from sarathi_sim.profiler.engine.processes import Floats, StageLog
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.engine.work import TIMED_OPS
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS, OPS
from sarathi_sim.profiler.planning.designed import skewed_contexts

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
    """The bundle of a played grid; ``works`` may hold each micro-batch several times.

    ``send_s`` is what a transfer between two stages takes, whatever its size.
    """
    layers = np.array(spec.layers, np.float64)
    # One layer of an op: the stages' sums, over all their layers.
    per_layer = log.ops[:, :, : _LAYERS + 1].sum(axis=1) / layers.sum()
    others = per_layer[:, _LAYERS] - per_layer[:, :_LAYERS].sum(axis=1)
    service = log.finish - log.start
    first = service[:, 0] - log.ops[:, 0, _LAYERS]
    last = log.ops[:, -1, _HEAD]
    if spec.pp == 1:
        first = first - last
    else:
        last = service[:, -1] - log.ops[:, -1, _LAYERS]
    rows = [(sum(c[1] for c in chunks) + len(decodes)) for chunks, decodes in works]
    outputs = [len(chunks) + len(decodes) for chunks, decodes in works]
    linear = [
        _table(rows, per_layer[:, TIMED_OPS.index(op)], "num_tokens", op) for op in LAYER_GEMMS
    ]
    linear += [
        _table(rows, others, "num_tokens", "others"),
        _table(rows, first, "num_tokens", "embedding"),
        _table(outputs, last, "num_tokens", "lm_head"),
    ]
    reduce = pd.DataFrame(columns=list(TABLES["all_reduce"].columns))
    if spec.tp > 1:
        size = 4 if spec.dtype == "float32" else 2
        reduced = [count * spec.model.hidden_size * size for count in rows]
        one = per_layer[:, TIMED_OPS.index("all_reduce")] / OPS["all_reduce"].calls
        reduce = _table(reduced, one, "num_bytes")
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
    return Bundle(
        meta,
        linear=pd.concat(linear, ignore_index=True),
        all_reduce=reduce,
        send_recv=send,
        **_points(works, per_layer),
    )


def _points(works: list[GridWork], per_layer: Floats) -> dict[str, pd.DataFrame]:
    """What the works tell beside their linear ops, by table.

    Attention of chunks alone, and of decodes alone (those of unequal contexts apart); whole layers
    of a chunk with decodes.
    """
    names = ("attn_prefill", "attn_decode", "attn_decode_skew", "mixed")
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for (chunks, decodes), times_us in zip(works, _us(per_layer), strict=True):
        contexts = [context for _, context in decodes]
        count, mean = len(contexts), round(sum(contexts) / max(1, len(contexts)))
        chunk = chunks[0][1:3] if chunks else ()
        if chunks and decodes:
            found["mixed"].append((*chunk, count, contexts[0], times_us[_LAYERS]))
        elif chunks:
            found["attn_prefill"].append((*chunk, times_us[TIMED_OPS.index("attn_prefill")]))
        else:
            time_us = times_us[TIMED_OPS.index("attn_decode")]
            if len(set(contexts)) == 1:
                found["attn_decode"].append((count, mean, time_us))
            else:
                found["attn_decode_skew"].append((count, mean, max(contexts), time_us))
    return {
        name: _medians(pd.DataFrame(found[name], columns=[*key, "time_us"]), list(key))
        for name, key in ((name, TABLES[name].key) for name in names)
    }


def _us(seconds: Floats) -> Floats:
    # A remainder that noise made negative is no time; a bundle's times are positive.
    return np.maximum(seconds * 1e6, 0.1)


def _table(keys: list[int], seconds: Floats, column: str, op: str | None = None) -> pd.DataFrame:
    frame = _medians(pd.DataFrame({column: keys, "time_us": _us(seconds)}), [column])
    if op is not None:
        frame.insert(0, "op", op)
    return frame


def _medians(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row a key, sorted: the median of its repeats, and the spread of those."""
    times = frame.groupby(keys)["time_us"]
    median, between = times.median(), times.quantile(0.75) - times.quantile(0.25)
    spread = (100 * between / median).round(3)
    return pd.DataFrame({"time_us": median, "spread_pct": spread}).reset_index()
