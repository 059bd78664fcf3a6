"""A profile bundle measured in the running engine: its own ops, between its own other work.

All stages are kept busy with synthetic micro-batches, as in serving. What a layer takes beyond its
GEMMs and attention is ``others``; what a stage takes beyond its layers is ``embedding`` (the first)
and ``lm_head`` (the last), so that the parts add up to what the engine takes. torch-free.
"""

from __future__ import annotations

from datetime import date

import numpy as np
import pandas as pd

from profiler.engine_processes import Floats, StageLog
from profiler.engine_spec import EngineSpec
from profiler.schema import Bundle, BundleMeta
from profiler.tables import TABLES
from profiler.work import TIMED_OPS

GridWork = tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]
_LAYERS, _HEAD = len(TIMED_OPS), len(TIMED_OPS) + 1


def grid_works(max_batch: int, chunks: list[int], whole: list[int], longest: int) -> list[GridWork]:
    """Micro-batches that cover what a workload will do.

    Decodes alone: every number up to ``max_batch``, at three contexts up to ``longest``. Chunks
    alone: those of ``chunks`` with and without context, those of ``whole`` without.
    """
    works: list[GridWork] = []
    for batch in range(1, max_batch + 1):
        contexts = (longest // 8, longest // 2, longest - 1)
        works += [([], [(slot, context) for slot in range(batch)]) for context in contexts]
    for tokens in sorted({*chunks, *whole}):
        before = [0]
        if tokens in chunks:
            before += [c for c in (longest // 4, longest // 2) if c + tokens <= longest]
        works += [([(0, tokens, context, 1)], []) for context in before]
    return works


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
        _table(rows, per_layer[:, TIMED_OPS.index(op)], "num_tokens", op)
        for op in ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
    ]
    linear += [
        _table(rows, others, "num_tokens", "others"),
        _table(rows, first, "num_tokens", "embedding"),
        _table(outputs, last, "num_tokens", "lm_head"),
    ]
    chunked = [i for i, (chunks, _) in enumerate(works) if chunks]
    decoding = [i for i, (chunks, _) in enumerate(works) if not chunks]
    prefill = pd.DataFrame(
        {
            "chunk_tokens": [works[i][0][0][1] for i in chunked],
            "context_tokens": [works[i][0][0][2] for i in chunked],
            "time_us": _us(per_layer[chunked, TIMED_OPS.index("attn_prefill")]),
        }
    )
    decode = pd.DataFrame(
        {
            "batch_size": [len(works[i][1]) for i in decoding],
            "context_tokens": [works[i][1][0][1] for i in decoding],
            "time_us": _us(per_layer[decoding, TIMED_OPS.index("attn_decode")]),
        }
    )
    reduce = pd.DataFrame(columns=list(TABLES["all_reduce"].columns))
    if spec.tp > 1:
        size = 4 if spec.dtype == "float32" else 2
        reduced = [count * spec.model.hidden_size * size for count in rows]
        # There are two a layer.
        reduce = _table(reduced, per_layer[:, TIMED_OPS.index("all_reduce")] / 2, "num_bytes")
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
        pd.concat(linear, ignore_index=True),
        _medians(prefill, ["chunk_tokens", "context_tokens"]),
        _medians(decode, ["batch_size", "context_tokens"]),
        reduce,
        send,
    )


def _us(seconds: Floats) -> Floats:
    # A remainder that noise made negative is no time; a bundle's times are positive.
    return np.maximum(seconds * 1e6, 0.1)


def _table(keys: list[int], seconds: Floats, column: str, op: str | None = None) -> pd.DataFrame:
    frame = _medians(pd.DataFrame({column: keys, "time_us": _us(seconds)}), [column])
    if op is not None:
        frame.insert(0, "op", op)
    return frame


def _medians(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row a key, sorted: the median of its repeats."""
    return frame.groupby(keys)[["time_us"]].median().reset_index()
