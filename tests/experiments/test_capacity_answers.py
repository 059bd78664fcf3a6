"""What ``capacity`` and ``recommend`` answer: the sentence, the tables, and how much of it a
terminal shows; numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from sarathi_sim.experiments.report.capacity_answers import capacity_section, recommend_section
from sarathi_sim.experiments.report.render import terminal
from tests.experiments.small_report import PRICES, recommended, searched

QUEUE = "limiting metric: p99 ttft 1s (requests wait for their first chunk)."


def capacities(*rows: dict[str, Any], **given: Any) -> Any:
    content = {"name": "layouts", "description": "", "slo": "p99 ttft 1s", "load": "rate"}
    content |= {"deployments": rows, "tolerance": 0.11, "keep": 0.9, "prices": PRICES, "notes": {}}
    return capacity_section(None, content | given)


def free(name: str, gpus: int, load: float, **given: Any) -> dict[str, Any]:
    """A deployment on GPUs without a price."""
    return searched(name, gpus, load) | {"per_million_output_tokens": None} | given


NONE = free("TP 1", 1, 1.0, capacity=0.0)
UNKNOWN = {"name": "TP 2", "gpus": 2, "capacity": None, "error": "the SLO holds", "settled": False}


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        ([free("a", 1, 4.0)], "best: a, 4.00 requests/s; "),
        (
            [free("a", 1, 3.8), free("b", 1, 4.0)],
            "best: b, 4.00 requests/s; next: a, 3.80 requests/s (no significant difference); ",
        ),
        (
            [free("a", 1, 2.0), free("b", 1, 4.0), free("c", 1, 1.0)],
            "best: b, 4.00 requests/s; next: a, 2.00 requests/s; ",
        ),
        (
            [free("a", 1, 4.0, uncertainty=[3.2, 5.0])],
            "best: a, 4.00 requests/s (3.20 to 5.00 at 90 %); ",
        ),
        (
            [free("a", 1, 4.0, rejected_share=0.25)],
            "best: a, 4.00 (25.0% of requests rejected) requests/s; ",
        ),
        ([NONE], "best: none keeps the SLO, even under a small load."),
        ([NONE, UNKNOWN], "best: not known, because the runs were too short, or failed."),
    ],
)
def test_the_sentence_of_a_capacity(rows: list[dict[str, Any]], answer: str) -> None:
    for row in rows:  # the mean of both is the crossing, 5 % to either side
        row["interval"] = row["capacity"] and [0.95 * row["capacity"], 1.05 * row["capacity"]]
    said = capacities(*(row | {"rejected_because": "is long"} for row in rows)).answer
    assert said == (answer + QUEUE if answer.endswith("; ") else answer)


def test_the_table_of_capacities() -> None:
    found = capacities(searched("TP 8", 8, 8.0), UNKNOWN | {"point": {}})
    assert found.tables[0].headings == (
        *("deployment", "limiting metric", "requests/s", "95 % interval", "uncertainty"),
        *("GPUs", "per GPU", "USD/M out"),
    )
    first, second = found.tables[0].rows
    assert first == ["TP 8", "p99 ttft 1s", "8.00", "7.20 to 8.00", "-", "8", "1.00", "6.94"]
    assert second == ["TP 2", "-", "-", "-", "-", "2", "-", "-"]
    assert found.warnings == ["TP 2: no capacity: the SLO holds"]
    row = found.tables[1].rows[0]
    assert row[2:5] == ["requests wait for their first chunk", "8.00", "7.20 to 8.00"]
    assert row[7:] == ["8.80", "3.00", "25", "10", "90", "12"], "the probe above it is at 3 limits"


def test_what_is_not_settled_or_wide_is_warned_of() -> None:
    why = {"settled": False, "why_not": "runs of 200 requests last 9 s", "capacity": None}
    open_, wide = free("one", 1, 211.0) | why, free("two", 1, 211.0, interval=[200.0, 222.0])
    said = capacities(open_, wide, free("three", 1, 211.0, interval=[210.0, 212.0]), tolerance=0.05)
    assert said.warnings[0].startswith("one: not settled: runs of 200 requests last 9 s: give more")
    assert said.warnings[1].startswith("two: the interval is 10.4 % wide")
    assert len(said.warnings) == 2 and said.tables[0].rows[0][2] == "not settled"


# recommend -------------------------------------------------------------------------------------

FOUR = searched("TP 2 budget 512 seqs 64 x 4", 8, 12.0) | {"replicas": 4}
SCREENED = searched("TP 4 budget 512 seqs 64 x 2", 8, 5.0) | {"about": 10.0, "replicas": 2}
del SCREENED["binds"], SCREENED["at_capacity"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"equal": ["a"]}, "equal: a; "),
        ({"equal": [*"abcd"]}, "equal: a and 3 more; "),
        (
            {"equal": ["a"], "next": {"name": "b", "saves": 0.164, "at_least": False}},
            "equal: a; next: b (the best is 16.4 % cheaper); ",
        ),
        (
            {"next": {"name": "", "saves": 0.3, "at_least": True}},
            "next: all other layouts (the best is at least 30.0 % cheaper); ",
        ),
    ],
)
def test_the_sentence_claims_no_more_than_is_known(given: dict[str, Any], said: str) -> None:
    """20 USD an hour for 1,200 output tokens a second."""
    best = "best: 4 servers of TP 2 budget 512 seqs 64, 8 GPUs, 12.00 requests/s at 4.63 USD per "
    answer = recommend_section(None, recommended(FOUR, **given)).answer
    assert answer == f"{best}million output tokens; {said}{QUEUE}"


def test_the_sentence_for_a_rate() -> None:
    sure = FOUR | {"servers_90": [3, 5]}
    answer = recommend_section(None, recommended(sure, rate=8.0)).answer
    assert answer.startswith(
        "best: 4 servers (3 to 5 at 90 %) of TP 2 budget 512 seqs 64, 8 GPUs, 20.00 USD per hour "
        "for 8 requests/s; limiting"
    )
    none = recommend_section(None, recommended(FOUR, rate=8.0, winner=None)).answer
    assert none == "best: no deployment sustains 8 requests/s under the SLO in these runs."


def test_the_planners_table_and_other_numbers_of_servers() -> None:
    """Prices of the screened one are at the rate: 20 USD an hour for 3,200 and 800 tokens/s."""
    fewer = {"load": 8.0, "breaks": "p99 ttft 1s", "value": 1.25}
    given = {"rate": 8.0, "one_fewer": fewer, "screened": [SCREENED], "equal": [SCREENED["name"]]}
    table = recommend_section(None, recommended(FOUR, **given)).tables[0]
    costs = ("USD/h", "USD/M in", "USD/M out")
    assert table.headings == ("deployment", "limiting metric", "GPUs", *costs, "headroom")
    assert [row[2:] for row in table.rows] == [
        ["8", "20.00", "1.157", "4.630", "1.50"],
        ["8", "20.00", "1.736", "6.944", "~1.25"],
    ]
    assert table.rows[1][:2] == [f"= {SCREENED['name']}", "p99 ttft 1s"]
    # Of one server 3 requests/s, 2 GPUs, 5 USD an hour.
    assert table.note.splitlines() == [
        "=: no significant difference from the best; ~: from short runs.",
        "One server fewer: 6 GPUs, 15.00 USD per hour, breaks p99 ttft 1s (1.25) at 8.00 "
        "requests/s.",
        "One server more: 10 GPUs, 25.00 USD per hour, sustains 15.00 requests/s (computed).",
        "Twice the rate: 12 GPUs, 30.00 USD per hour, 6 servers (computed from one, not "
        "simulated).",
    ]


def test_the_best_of_each_gpu_and_engine_or_of_each_layout() -> None:
    def row(name: str, device: str, stack: str) -> dict[str, Any]:
        return searched(name, 8, 8.0) | {"device": device, "stack": stack}

    kinds = [row("a", "h100", "vllm"), row("b", "h100", "vllm"), row("c", "h100", "sglang")]
    names = [each[0] for each in recommend_section(None, recommended(*kinds)).tables[0].rows]
    assert names == ["a", "c"]
    alike = [searched(f"TP {tp} budget {n} seqs 8", 8, 8.0) for tp in (8, 4) for n in (256, 512)]
    names = [each[0] for each in recommend_section(None, recommended(*alike)).tables[0].rows]
    assert names == ["TP 8 budget 256 seqs 8", "TP 4 budget 256 seqs 8"]


def test_the_options_are_in_the_order_of_their_price() -> None:
    """The first is what was chosen; 20 USD an hour for 10 requests/s are less than for 6."""
    exact = searched("TP 8 budget 512 seqs 64 x 1", 8, 6.0)
    found = recommend_section(None, recommended(FOUR, exact, screened=[SCREENED]))
    names = [row[0] for row in found.tables[0].rows]
    assert names == [FOUR["name"], SCREENED["name"], exact["name"]]
    broken = [SCREENED | {"holds_at_rate": False}]
    found = recommend_section(None, recommended(FOUR, screened=broken, rate=8.0))
    assert [row[0] for row in found.tables[0].rows] == [FOUR["name"]]


def test_what_was_left_out_is_a_table_that_begins_with_what_came_furthest() -> None:
    left = {"beaten_by": None, "at": None, "clause": None}
    dropped = {
        "a": left | {"stage": "failed", "clause": "RuntimeError: no"},
        "b": left | {"stage": "bound", "beaten_by": "x", "at": 2.5},
        "c": left | {"stage": "race", "beaten_by": "x", "at": 3.0, "clause": "p99 tbt 50ms"},
        "d": left | {"stage": "bound", "at": 1.0},
    }
    found = recommend_section(None, recommended(FOUR, dropped=dropped))
    assert found.warnings == ["a: left out, as a run failed: RuntimeError: no"]
    assert [row[0] for row in found.tables[-1].rows] == ["c", "b", "d", "a"]
    assert found.tables[-1].rows[0][1:3] == ["worse after one short run", "x"]
    assert found.tables[1].note.startswith(
        "Of 5 deployments: 1 searched, 1 worse after one short run, 2 ruled out by op times "
    )


LONG = "h100-80g-sxm trtllm fp8_block TP 8 DP 2 EP drafts 2 budget 8192 seqs 512"
MANY = [searched(f"TP {n} PP {n} budget 8192 seqs 512 x 4", 8, 8.0 - n / 9) for n in range(12)]
WORDY = {"notes": {"one": [f"topic {n}: {'word ' * 60}" for n in range(9)]}}
DOUBTS = {"doubts": {"one": [f"doubt {n}: {'word ' * 60}" for n in range(9)]}}
FEWER = {"load": 8.0, "breaks": "attainment 95% ttft 1s tpot 50ms", "value": 0.9312}


@pytest.mark.parametrize(
    ("rows", "given", "least"),
    [
        (MANY, WORDY, 8),
        (MANY, WORDY | DOUBTS, 6),
        (MANY, WORDY | DOUBTS | {"rate": 4.0, "equal": [m["name"] for m in MANY[3:]]}, 4),
        (MANY[:3], {"rate": 4.0, "screened": [SCREENED] * 9, "one_fewer": FEWER}, 4),
        ([one | {"name": f"{LONG} x {n}"} for n, one in enumerate(MANY)], WORDY | DOUBTS, 2),
        ([FOUR], {"winner": None, "command": None, "rate": 8.0}, 1),
        ([FOUR], {"command": None, "needs": f"no launch file: {'word ' * 60}"}, 1),
        ([FOUR | {"pools": {}, "replicas": 1, "name": LONG}], {"gpus": 8}, 1),
    ],
)  # fmt: skip
def test_a_first_look_fits_a_terminal(
    rows: list[dict[str, Any]], given: dict[str, Any], least: int
) -> None:
    """25 lines of 100 columns, with the command, what is assumed and what is in doubt."""
    second = {"name": rows[-1]["name"], "saves": 0.1, "at_least": False}
    section = recommend_section(None, recommended(*rows, **{"next": second} | given))
    section = replace(section, command=section.command and "sh runs/recommend/launch.sh")
    lines = terminal(section, Console(width=100)).splitlines()
    assert max(len(line) for line in lines[2:]) <= 100, "the answer is a line, the command one"
    assert sum(max(1, math.ceil(len(line) / 100)) for line in lines) <= 25
    assert len(section.tables[0].rows) >= least
    assert section.answer in terminal(section, Console(width=10_000), verbose=True)
