"""``sarathi-sim lab validate`` end to end, on a tiny model; and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.experiments.small_config import refused
from tests.lab.test_validation import CONFIG
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.lab
ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "name": "tiny", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "ffn_hidden_size": 128, "gated_ffn": True, "vocab_size": 96,
    "tied_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip


def validate(*arguments: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "sarathi_sim", "lab", "validate", *arguments]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


def config(tmp_path: Path, **changes: Any) -> str:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(MODEL))
    content = CONFIG | {
        "model": str(tmp_path / "tiny.yaml"),
        "validation": {"repeats": 2, "calibration_requests": 4},
        **changes,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.slow
def test_validate_writes_its_report(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    out = tmp_path / "result"
    done = validate(config(tmp_path), "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "validation.json").read_text())
    assert result["format"] == "sarathi-sim validation 1"
    assert {name: cell["parity"] for name, cell in result["cells"].items()} == {
        "orca": 1.0, "sarathi": 1.0, "online": 1.0,
    }  # fmt: skip
    orca = result["cells"]["orca"]
    assert len(orca["calibrated"]["repeats"]) == result["repeats"]["pp2_tp1"]["run"] == 2
    assert orca["noise_floor"] > 0
    assert result["ratios"]["bubble"]["measured"]["median"] > 0
    for name in ("iterations", "timelines"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 10_000
    assert "Batches are identical in 3 of 3 cells" in done.stdout
    # It replaces its own result, and nothing else.
    again = validate(config(tmp_path), "--out", str(tmp_path))
    assert again.returncode == 2
    assert "so it is not replaced" in again.stderr


METRIC = "compare.bubble.metric: value 'ttft_s.p50': a validation compares makespan_s"
REFUSED = {
    "--profiles=none": "the engine needs torch",
    "--realtime": "needs Linux, and root",
    "--set=compare.bubble.metric=ttft_s.p50": METRIC,
    "--set=validation.repeats=0": "validation.repeats: value 0: must be at least 1",
}


@pytest.mark.parametrize(("argument", "message"), REFUSED.items())
def test_what_cannot_be_validated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, message: str
) -> None:
    if "torch" in message:
        monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    out = tmp_path / "out"
    assert message in refused("lab", "validate", config(tmp_path), "--out", out, argument)
    assert not out.exists()
