"""What needs more memory than there is gets refused before it is taken."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from sarathi_sim.experiments.config import deployment
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.profiler.storage.child import size_text
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load import trace
from sarathi_sim.simulator.load.requests import WorkloadError
from sarathi_sim.simulator.load.trace import read_trace
from sarathi_sim.simulator.op_times.predictor import BundlePredictor, TableSizes
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.experiments.small_config import SMALL, deployed, loaded, message
from tests.simulator.test_predictor import simple_bundle

ALONE = SMALL.partition("scenarios:")[0]
LONG = "{kind: zipf, theta: 1, min: 2, max: 16777216}"
DECLARED = ("workload.declared=exact", "batching.kv_reservation=declared")


def _free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(deployment, "available_bytes", lambda: num_bytes)
    monkeypatch.setattr(trace, "available_bytes", lambda: num_bytes)


def test_tables_are_no_larger_than_the_workload() -> None:
    """A chunk longer than any prompt, a batch larger than the workload, a long limit."""
    sizes = deployed(SMALL, "scenarios.sarathi.policy.chunk_size=16777216")["sarathi"].table_sizes
    assert sizes.tokens < 600 and sizes.chunk_blocks < 600 / 32
    wide = ("batching.max_batch=10000000", *DECLARED)
    few = deployed(SMALL, *wide)["orca"]
    assert few.scenario.batching.max_batch == 10_000_000 and few.table_sizes.sequences == 60
    # As many as the KV cache holds of the shortest, where there are more requests than that.
    many = deployed(SMALL, *wide, "workload.requests=20000")["orca"]
    assert many.table_sizes.sequences == many.kv_capacity // 200
    long = deployed(SMALL, "cluster.max_length=16777216", *DECLARED)["orca"]
    assert long.table_sizes.whole_prompts == 512


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        ("workload.requests=9000000", "workload.requests", 9_000_000),
        ("cluster.replicas=4096", "cluster.replicas", 4096),
        (f"workload.lengths={LONG}", "workload.lengths.max", 16_777_216),
    ],
)
def test_more_than_there_is(
    monkeypatch: pytest.MonkeyPatch, assignment: str, key: str, value: int
) -> None:
    _free(monkeypatch, 50_000_000)
    one = loaded(ALONE, assignment)
    with pytest.raises(UserError) as caught:
        deploy(one.scenarios["small"], one.sources["small"])
    text = str(caught.value)
    assert f"--set {key}: value {value}: would need about " in text
    assert f" of memory ({key} " in text
    assert text.endswith("but only 50 MB is free")


def test_what_any_process_has_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And scenarios that are held at once count together."""
    _free(monkeypatch, 20_000_000)
    text = message(SMALL, "workload.requests=10000")
    assert "scenarios: together they would need about 28 MB of memory (scenario orca 14 MB" in text
    assert (size_text(2.34e10), size_text(5e7)) == ("23.4 GB", "50 MB")
    _free(monkeypatch, 0)
    needed = deployed(ALONE)["small"].memory_bytes.total()
    assert 0 < needed < deployment.ALWAYS_FREE
    assert deployment.shortage(Counter(key=deployment.ALWAYS_FREE + 1))


def test_a_trace_without_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with path.open("wb") as file:
        file.truncate(50_000_000)  # sparse
    with pytest.raises(WorkloadError, match="line 1 is longer than 1048576 characters"):
        read_trace(path)


def test_a_trace_too_large_for_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,decode\n" + "0,100,10\n" * 40_000)
    _free(monkeypatch, 3_000_000)
    with pytest.raises(WorkloadError, match=r"about [34]\d{4} rows would take \d+ MB of memory"):
        read_trace(path)
    _free(monkeypatch, 100_000_000)
    assert len(read_trace(path).prompt) == 40_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "estimate"),
    [
        (TableSizes(100_000, 64, 1), 2**17 * deployment.TOKEN_BYTES),
        (TableSizes(1, 50_000, 1), (50_000 + 1024) * deployment.POINT_BYTES),
        (TableSizes(1, 4096, 1000), 130 * 1000 * deployment.POINT_BYTES),
    ],
)
def test_estimates_are_near_what_is_taken(sizes: TableSizes, estimate: int) -> None:
    """Not under what is taken at most, nor over three times that."""

    def build(size: TableSizes) -> BundlePredictor:
        return BundlePredictor(
            ops, max_tokens=size.tokens, max_length=size.max_length, max_batch=size.sequences
        )

    ops = bundle_times(simple_bundle())
    build(TableSizes(2000, 96, 2))  # fits the regressions
    gc.collect()
    tracemalloc.start()
    kept = build(sizes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    assert peak < estimate * 1.1 and estimate < 3 * peak
