"""The registry of ops: what it says, and that no other file says it again."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import (
    ATTENTION,
    EDGE_OPS,
    GEMMS,
    LAYER_GEMMS,
    LAYER_OPS,
    OPS,
    PARTS,
    SENDS,
    op_of,
)

ROOT = Path(__file__).resolve().parents[2]
#: Who may name an op: what measures it, the bundle's own tables, readers of foreign files, and what
#: the paper says of one. Everything else asks the registry.
MAY_NAME = (
    "profiler/facts/ops.py",
    "profiler/measuring/",
    "profiler/engine/",
    "profiler/shard/",
    "profiler/bundle/tables.py",
    "profiler/bundle/schema.py",
    "profiler/physics/",
    "experiments/lab/",
)


def test_the_registry_lists_the_ops_in_the_order_they_run() -> None:
    assert LAYER_GEMMS == ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
    assert (*LAYER_GEMMS, "others") == LAYER_OPS and EDGE_OPS == ("embedding", "lm_head")
    assert (*LAYER_GEMMS, "lm_head") == GEMMS and ATTENTION == ("attn_prefill", "attn_decode")
    assert {op.part for op in OPS.values()} == set(PARTS)


def test_every_op_by_rows_can_be_modelled() -> None:
    for name in (*LAYER_OPS, *EDGE_OPS):
        assert (OPS[name].shape is None) != (OPS[name].streams is None), name


def test_transfers_are_found_by_op_and_scope() -> None:
    assert set(SENDS) == {"send_recv_inter_node", "send_recv_intra_node"}
    assert all(op_of(name) is OPS["send_recv"] for name in SENDS)
    assert op_of("preproj") is OPS["preproj"]
    with pytest.raises(KeyError):
        op_of("send_recv_elsewhere")


def test_shapes_of_one_rank() -> None:
    model = load_model("llama-13b")
    whole, half = model.gemms(1), model.gemms(2)
    for op in LAYER_GEMMS:
        columns = OPS[op].split == "columns"
        assert (whole[op].n, whole[op].k) == (
            half[op].n * (2 if columns else 1),
            half[op].k * (1 if columns else 2),
        )
    assert model.layer_weights(2) * 2 == model.layer_weights(1)


def test_an_all_reduce_follows_every_gemm_that_is_split_by_rows() -> None:
    by_rows = [op for op in LAYER_GEMMS if OPS[op].split == "rows"]
    assert OPS["all_reduce"].calls == len(by_rows)


def test_no_other_file_names_an_op() -> None:
    found = []
    for package in ("profiler", "simulator", "experiments", "policies"):
        for path in sorted((ROOT / package).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if not file.startswith(MAY_NAME):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
                found += [f"{file}: {text}" for text in texts if text in OPS]
    assert not found, f"ask profiler/facts/ops.py instead: {found}"
