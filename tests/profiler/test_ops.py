"""The registry of ops: what it says, and that no other file says it again."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sarathi_sim.profiler.facts.ops import (
    LAYER_GEMMS,
    OPS,
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


def test_transfers_are_found_by_op_and_scope() -> None:
    assert set(SENDS) == {"send_recv_inter_node", "send_recv_intra_node"}
    assert all(op_of(name) is OPS["send_recv"] for name in SENDS)
    assert op_of("preproj") is OPS["preproj"]
    with pytest.raises(KeyError):
        op_of("send_recv_elsewhere")


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
