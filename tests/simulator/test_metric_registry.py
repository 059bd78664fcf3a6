"""The one declaration of every metric: complete, documented, and what all others read."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_sim.experiments.config.loading import SHAPE
from sarathi_sim.simulator.views.metric_registry import (
    METRICS,
    STEADY,
    Better,
    known,
    number_text,
    quantity,
)

DOCS = Path(__file__).resolve().parents[2]


def _paths(node: object, before: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [before.rstrip(".")]
    return [path for key, below in node.items() for path in _paths(below, f"{before}{key}.")]


def test_every_number_of_a_summary_has_a_name_and_the_path_it_is_found_by() -> None:
    for path in _paths(SHAPE):
        found = quantity(path)
        assert (found is None) == (path == "steady.state"), path
        if found is not None:
            assert found.path == path
            assert "_" not in found.axis, "no raw key on an axis"


def test_the_table_of_metrics_in_the_docs_is_the_registry() -> None:
    """With an anchor for each, under its key."""
    lines = ["| key | name | unit | better |", "|---|---|---|---|"]
    for metric in METRICS.values():
        statistics = f" ({', '.join(metric.statistics)})" if metric.statistics else ""
        lines.append(
            f'| <a id="{metric.key}"></a>`{metric.key}` | {metric.name}{statistics} '
            f"| {metric.unit or 'a count'} | {metric.better} |"
        )
    table = "\n".join(lines) + "\n"
    assert table in (DOCS / "docs" / "metrics.md").read_text(encoding="utf-8"), table


@pytest.mark.parametrize(
    ("path", "axis"),
    [
        ("tbt_s.p99", "time between tokens, p99 (s)"),
        ("ttft_s.p50", "time to first token, median (s)"),
        ("ttft_s", "time to first token (s)"),
        ("output_tokens_per_s", "output token throughput (tokens/s)"),
        ("mfu", "model FLOPs utilisation (%)"),
        ("gpus", "GPUs"),
        ("ledger_s.pb2", "stages' time, PB2 (s)"),
        ("steady.latency_s.p90", "latency, p90, steady part (s)"),
    ],
)
def test_axes(path: str, axis: str) -> None:
    assert known(path).axis == axis


@pytest.mark.parametrize("path", ["", "steady", "steady.tbt_s.p50", "tbt_s.mean", "mfu.p50", "x"])
def test_what_is_no_metric(path: str) -> None:
    assert quantity(path) is None
    with pytest.raises(KeyError):
        known(path)


def test_directions() -> None:
    better = {key: metric.better for key, metric in METRICS.items()}
    for key in ("makespan_s", "tbt_s", "bubble_s", "bubble_share", "rejected", "gpus", *STEADY):
        assert better[key] is Better.LESS
    for key in ("requests_per_s", "tokens_per_s", "output_tokens_per_s", "mfu", "finished"):
        assert better[key] is Better.MORE
    assert better["mean_batch"] is Better.NEITHER


def test_a_share_is_printed_in_percent_and_a_count_whole() -> None:
    assert known("mfu").text(0.1314) == "13.14"
    assert known("gpus").text(64) == "64"
    texts = [number_text(value) for value in (0.0, 0.04849, 0.5, 5.988, 100.26, 1234.5, 12345)]
    assert texts == ["0", "0.0485", "0.5", "5.99", "100.3", "1,234", "12,345"]
