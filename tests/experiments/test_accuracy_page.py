"""docs/accuracy.md from a score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sarathi_sim.experiments.lab.pages import update
from sarathi_sim.experiments.measured.accuracy_page import DENSE, MIXTURES, tables
from sarathi_sim.experiments.measured.answers import KINDS

ALL, OF_MIXTURES = KINDS[DENSE], KINDS[MIXTURES]
PAGE = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")


def of(mape: float) -> dict[str, Any]:
    numbers = {"mape": mape, "median": mape / 2, "p90": 9.0, "bias": -1.0, "coverage": 88.0}
    return {"n": 3, "ttft": numbers, "tpot": numbers, "latency": {**numbers, "coverage": 91.0}}


CONTENT = {
    "groups": {ALL: of(4.0), "engine vllm": of(5.0), "flagged": {**of(1.0), "n": 0}},
    "variants": {
        "zero_fit": {ALL: of(6.0), "engine vllm": of(7.0)},
        "cross_validated": {ALL: of(4.0)},
        "leave_one_gpu_out": {ALL: {"n": 0}},
    },
    "peers": {"peer.csv": {"groups": {ALL: {"n": 2, "ours": of(3.0), "theirs": of(40.0)}}}},
    "host_time": {"vllm": {"host_iteration_s": 1e-3, "host_sequence_s": 2e-5, "frontend_s": 0.01}},
    "rows": 5,
    "answered": 3,
    "refused": {"mode disagg": 2},
}


def made_with(content: dict[str, Any], *rows: str) -> str:
    """The page made of a score, which has these rows."""
    made = update(PAGE, tables(content), some=True)
    assert [row for row in rows if row not in made] == []
    return made


def test_every_table_of_the_page_is_made() -> None:
    made = made_with(
        CONTENT,
        "| ours, nothing fitted to such rows | 3 | 6.0 / 3.0 | 6.0 / 3.0 |",
        "| peer, on the rows that it answers | 2 | 40.0 / 20.0 | 40.0 / 20.0 |",
        "| cross validated | 3 | 4.0 / 2.0 | 4.0 / 2.0 | 4.0 / 2.0 | 88 % | 88 % | 91 % |",
        "| engine vllm | 3 | 5.0 / 2.5 | -1.0 | 88 % | 7.0 / 3.5 | 5.0 / 2.5 |",
        "| vllm | 1.00 | 0.0200 | 10.0 |",
        "| mode disagg | 2 |",
    )
    dense = "| leave one gpu out | 499 |"
    assert dense in PAGE and dense not in made
    groups = made.partition("table: Errors by group, dense models")[2].partition("<!-- end")[0]
    assert "| engine vllm |" in groups and "| flagged |" not in groups


def test_the_page_has_its_numbers() -> None:
    assert "| ours, fitted to other servers (cross-validated) | 499 |" in PAGE


def test_a_score_of_mixtures_alone_leaves_the_other_tables() -> None:
    content = {
        "groups": {ALL: {"n": 0}, OF_MIXTURES: of(8.0), "model gpt": of(9.0), "mode agg": of(8.0)},
        "variants": {
            "zero_fit": {OF_MIXTURES: of(30.0), "model gpt": of(31.0)},
            "cross_validated": {OF_MIXTURES: of(8.5)},
        },
        "host_time_of_mixtures": {
            "trtllm": {"host_iteration_s": 0.0, "host_sequence_s": 0.0, "frontend_s": 0.0,
                       "frontend_token_s": 4.8e-6, "launch_s": 7.5e-5},
        },
        "rows": 3,
        "answered": 3,
        "refused": {},
    }  # fmt: skip
    made = made_with(
        content,
        "| ours, nothing fitted to such rows | 3 | 30.0 / 15.0 | 30.0 / 15.0 |",
        "| model gpt | 3 | 9.0 / 4.5 | -1.0 | 88 % | 31.0 / 15.5 |",
        "| cross validated | 3 | 8.5 / 4.2 | 8.5 / 4.2 | 8.5 / 4.2 |",
        "| trtllm | 4.8 | 75 |",
    )
    assert "mode agg" not in made and PAGE.partition("## What is simulated")[0] in made
