"""Files of other programs that are damaged or unusual: one message, or the right numbers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.facts.hf_config import model_fields
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.load.trace import read_trace
from sarathi_sim.simulator.load.workload import WorkloadError
from tests.experiments.small_config import SMALL


def _trace(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(("arrival,prompt,decode", *rows)), encoding="utf-8")
    return path


def test_leading_zeros(tmp_path: Path) -> None:
    zeros = "0" * 5000
    assert read_trace(_trace(tmp_path, f"0,{zeros}7,1")).prompt.tolist() == [7]
    for number in (f"{zeros}99999999", "9" * 5000, zeros):
        with pytest.raises(
            WorkloadError, match=r"row 2: prompt is .*must be a whole number from 1"
        ):
            read_trace(_trace(tmp_path, f"0,{number},1"))


def test_arrivals_beyond_any_clock(tmp_path: Path) -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(WorkloadError, match="row 2: arrival is '-1e308'"),
    ):
        warnings.simplefilter("error")
        read_trace(_trace(tmp_path, "-1e308,5,5", "1e308,5,5"))


def test_the_row_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"arrival,prompt,decode\n0,5,5\n1,5,\xff\n")
    with pytest.raises(WorkloadError, match="row 3 is not readable CSV: it is not UTF-8 text"):
        read_trace(path)


def test_more_requests_than_the_trace_has(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace("  pd_ratio: 5\n", ""), encoding="utf-8")
    trace = _trace(tmp_path, "0,5,5", "3e6,5,5")
    kind = f"workload.lengths={{kind: trace, path: {trace}}}"
    with pytest.raises(ConfigError, match=r"workload\.requests: value 60: must be at most 2, the"):
        deploy_all(load_experiment(path, [kind]))
    late = [kind, "workload.requests=2", "workload.arrivals={kind: trace}"]
    with pytest.raises(
        ConfigError, match=r"lengths\.path: .*the last request arrives after 3e\+06"
    ):
        deploy_all(load_experiment(path, late))


@pytest.mark.parametrize("kind", [["llama"], {}, None, 3])
def test_a_model_type_that_is_no_text(kind: object) -> None:
    with pytest.raises(SpecError, match=r"config\.json: model_type .* is not supported; allowed: "):
        model_fields({"model_type": kind}, "config.json")
