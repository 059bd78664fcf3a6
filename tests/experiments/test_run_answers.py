"""The sentences and tables of run, sweep and compare: who is called better, and who is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import sarathi_sim as sim
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.report.run_answers import (
    comparison_section,
    run_section,
    sweep_section,
)
from sarathi_sim.experiments.run.compare import compare
from sarathi_sim.experiments.run.ranking import WEIGHED, Load
from sarathi_sim.simulator.views.metric_registry import number_texts
from tests.experiments.small_config import called, summary_of
from tests.experiments.small_sweep import CHUNK, RATE, of

TOKENS, TTFT, TBT = WEIGHED


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0542, 12.3], ["0.054", "12.300"]),
        ([1234.0, 980.0], ["1,234.0", "980.0"]),
        ([12345.0, 980.0], ["12,345", "980"]),
        ([2.0, 0.0], ["2.00", "0.00"]),
        ([0.1, 0.0542], ["0.1000", "0.0542"]),
        ([0.0001], ["0.000100"]),
        ([None, 3, float("nan")], ["-", "3", "-"]),
    ],
)
def test_numbers_of_a_metric_have_as_many_decimals(
    values: list[float | None], expected: list[str]
) -> None:
    assert number_texts(values) == expected


def load(metric: str, **values: list[float]) -> Load:
    return Load("", list(values), {metric: np.array([*values.values()])})


@pytest.mark.parametrize(
    ("logs", "winner"),
    [
        # The logarithms' mean is 0.1; Student's t of three seeds is 4.303, so their interval is
        # 0.1 +- 4.303 s / sqrt(3), which leaves out 0 up to s = 0.04025.
        ([0.1, 0.1, 0.1], "b"),
        ([0.1, 0.1 - 0.040, 0.1 + 0.040], "b"),
        ([0.1, 0.1 - 0.0405, 0.1 + 0.0405], None),
        ([0.0099, 0.0099, 0.0099], None),  # within 1 %
        ([0.0101, 0.0101, 0.0101], "b"),
        ([0.5], None),
        ([0.5, 0.5], None),
    ],
)
@pytest.mark.parametrize("metric", [TOKENS, TBT])
def test_a_winner_leads_by_more_than_the_spread_of_three_seeds(
    logs: list[float], winner: str | None, metric: str
) -> None:
    """Seeds differ by a factor of ten, in both options alike."""
    base = 10.0 ** np.arange(len(logs))
    factor = np.exp(logs if metric == TOKENS else -np.array(logs))
    found = load(metric, a=base.tolist(), b=(base * factor).tolist())
    assert found.winner(metric) == winner


def test_the_front_is_that_of_the_means() -> None:
    """For two of three seeds b has the shorter time; on average it is longer, at fewer tokens."""
    values = {"a": [1.0, 1.0, 1.0], "b": [0.5, 0.5, 3.5], "c": [2.0, 2.0, 2.0], "d": [0.1] * 3}
    tokens = {"a": [100.0] * 3, "b": [90.0] * 3, "c": [120.0] * 3, "d": [50.0, 50.0, np.nan]}
    both = load(TBT, **values).values | load(TOKENS, **tokens).values
    found = Load("", ["a", "b", "c", "d"], both)
    assert found.front(TBT, TOKENS) == ["a", "c"]
    assert found.left_out(TBT, TOKENS) == {"d": "only 2 of 3 seeds"}


PATHS = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tbt_s.p99", "latency_s.p50", "mfu")


def runs(**columns: list[object]) -> pd.DataFrame:
    """Runs whose metrics are 0.5 where nothing is said, each under a key of its own."""
    count = len(next(iter(columns.values())))
    given = {"steady.state": "steady", "name": "a", "run": [f"{n:016x}" for n in range(count)]}
    return pd.DataFrame(dict.fromkeys(PATHS, 0.5) | given | columns, index=range(count))


def chunks(seeds: int, *tbt: float, **columns: list[object]) -> pd.DataFrame:
    """A chunk size for each of the times between tokens, with so many seeds that are alike."""
    every = range(len(tbt))
    given: dict[str, list[object]] = {
        "seed": [*range(seeds)] * len(tbt),
        CHUNK: [128 * 2**n for n in every for _ in range(seeds)],
        TBT: [tbt[n] for n in every for _ in range(seeds)],
    }
    return runs(**given | columns)


@pytest.mark.parametrize(
    ("table", "answer"),
    [
        (
            chunks(3, 2.0, 2.4),
            "chunk 128: 2.00 s p99 time between tokens; next: chunk 256, 2.40 s p99 time between "
            "tokens; output token throughput: 0.500 tokens/s (chunk 256 0.500 tokens/s); p99 time "
            "to first token: 0.500 s (chunk 256 0.500 s); lead: more than the spread over 3 seeds.",
        ),
        # The same difference, of which every seed says the same: one seed is one seed.
        (chunks(1, 2.0, 2.4), "winner: not known from one seed (use three)."),
        (chunks(2, 2.0, 2.4), "winner: not known from two seeds (use three)."),
        (chunks(3, 2.0, 2.01), "winner: no significant difference over 3 seeds."),
        (
            chunks(3, 2.0, 2.4, **{TBT: [1.0, 2.0, 3.0, 3.6, 2.4, 1.2]}),
            "winner: no significant difference over 3 seeds.",
        ),
        # Whoever is left out is named.
        (
            chunks(3, 2.0, 2.4, 1.0, **{"steady.state": ["steady"] * 8 + ["overloaded"]}),
            "(chunk 256 0.500 s); overloaded: chunk 512; lead: more than the spread over 3 seeds.",
        ),
        (
            chunks(3, 2.0, 2.4, 1.0)[:-1],
            "(chunk 256 0.500 s); only 2 of 3 seeds: chunk 512; lead: more than the spread over 3 "
            "seeds.",
        ),
        (
            chunks(1, *[1.0] * 7, **{"steady.state": ["steady"] * 2 + ["overloaded"] * 5}),
            "; overloaded: chunk 512, chunk 1024, chunk 2048 and 2 more; winner: not known from "
            "one seed (use three).",
        ),
    ],
)
def test_the_sentence_of_a_sweep(table: pd.DataFrame, answer: str) -> None:
    section = sweep_section(of(table, [CHUNK, "seed"]))
    assert section.answer.endswith(answer)
    assert section.answer.startswith("chunk 128: ")
    first = f"sarathi-sim run sweep/runs/{0:016x}/config.yaml"
    assert section.command == (first if "lead: " in answer else "")


def test_choices_are_ranked_at_equal_load() -> None:
    """The highest offered rate wins nothing: the arrivals set the throughput."""
    table = runs(**{RATE: [1] * 6 + [2] * 6, CHUNK: ([128] * 3 + [256] * 3) * 2})
    table["seed"] = [0, 1, 2] * 4
    table[TOKENS] = [100.0] * 3 + [100.5] * 3 + [200.0] * 3 + [201.0] * 3
    table[TBT] = [0.05] * 3 + [0.1] * 3 + [0.06] * 3 + [0.0601] * 3
    table[TTFT] = [0.3] * 3 + [0.2] * 3 + [0.4] * 6
    section = sweep_section(of(table, [RATE, CHUNK, "seed"]))
    assert section.question == "Which chunk is best at each rate?"
    assert section.answer == (
        "chunk 128: 0.0500 to 0.0600 s p99 time between tokens; next: chunk 256, 0.0601 to 0.1000 "
        "s p99 time between tokens; output token throughput: 100.0 to 200.0 tokens/s (chunk 256 "
        "100.5 to 201.0 tokens/s); p99 time to first token: 0.300 to 0.400 s (chunk 256 0.200 to "
        "0.400 s); lead: more than the spread over 3 seeds at 1 of 2 loads."
    )
    assert section.command == f"sarathi-sim run sweep/runs/{0:016x}/config.yaml"
    assert section.tables[0].rows == [
        ("rate 1", "100.5: chunk 256 and 1 equal", "0.200: chunk 256", "0.0500: chunk 128"),
        (
            *("rate 2", "201.0: chunk 256 and 1 equal"),
            *("0.400: chunk 128 and 1 equal", "0.0600: chunk 128 and 1 equal"),
        ),
    ]
    table.loc[6:, "steady.state"] = "overloaded"
    assert sweep_section(of(table, [RATE, CHUNK, "seed"])).tables[0].rows[1][2] == "-"
    alone = sweep_section(of(table[::3].iloc[::2], [RATE]))
    assert alone.question == "How does the rate change throughput and latencies?"
    assert alone.answer == (
        "rate 1 to rate 2: 100.0 to 200.0 output tokens/s; p99 time to first token: 0.300 s; p99 "
        "time between tokens: 0.0500 to 0.0600 s; overloaded: rate 2."
    )


def test_the_table_says_who_is_overloaded_or_lacks_a_seed() -> None:
    table = runs(**{"seed": [0, 1] * 2, "cluster.tp": [1, 1, 2, 2], "latency_s.p50": [9, 9, 2, 4]})
    table["steady.state"] = ["steady", "overloaded", "steady", "steady"]
    swept = of(table[:3], ["cluster.tp", "seed"])
    missing = {"1" * 16: {"point": {"cluster.tp": 2, "seed": 1}, "error": None}}
    section = sweep_section(replace(swept, summary={"runs": 4, "missing": missing}))
    found = section.tables[0]
    columns = dict(zip(found.headings, zip(*found.rows, strict=True), strict=True))
    assert columns["latency, median (s)"] == ("overloaded", "2.00")
    assert columns["seeds"] == ("2 of 2", "1 of 2")
    assert columns["time between tokens, p99 (s)"] == ("0.500", "0.500")
    assert found.note == (
        "Predicted, means over 2 seeds. Latencies of overloaded runs are in results.parquet, over "
        "all their requests."
    )
    assert section.warnings[1] == "1 of 4 runs have no result: TP 2, seed 1"


def one(state: str = "steady", tokens: float = 10.0, ttft: float = 2.0) -> dict[str, Any]:
    """The summary of a run; latencies of all of it are ten times those of its steady part."""
    steady = {"p50": ttft / 2, "p99": ttft}
    every = {"p50": 5 * ttft, "p99": 10 * ttft}
    numbers = {"makespan_s": 100.0, "finished": 100, "gpus": 8, "output_tokens_per_s": tokens}
    numbers |= {"ttft_s": every, "latency_s": every, "tbt_s": {"p50": 0.05, "p99": 0.1}}
    part = {"ttft_s": steady, "latency_s": steady, "kendall_s": 45}
    return numbers | {"steady": {"state": state, **part}}


@pytest.mark.parametrize(
    ("summaries", "answer"),
    [
        (
            {"a": one()},
            "a: 10.00 output tokens/s, time to first token p50 1.00 s, p99 2.00 s, time between "
            "tokens p50 0.05 s, p99 0.1 s.",
        ),
        (
            {"a": one("overloaded")},
            "a: 10.00 output tokens/s, time between tokens p50 0.05 s, p99 0.1 s, overloaded.",
        ),
        (
            {"a": one("closed")},
            "a: 10.00 output tokens/s, time to first token p50 10.00 s, p99 20.00 s, time between "
            "tokens p50 0.05 s, p99 0.1 s; arrivals: all at once.",
        ),
        # However far apart: a run has one seed.
        (
            {"a": one(), "b": one(tokens=1234.0, ttft=0.25)},
            "a: 10.00 output tokens/s, time to first token p99 2.00 s, time between tokens p99 0.1 "
            "s; b: 1,234 output tokens/s, time to first token p99 0.25 s, time between tokens p99 "
            "0.1 s; winner: not known from one seed (use three).",
        ),
        (
            dict.fromkeys("abcdefg", one()),
            "; not shown here: d, e, f and 1 more; winner: not known from one seed (use three).",
        ),
    ],
)
def test_the_sentence_of_a_run(summaries: dict[str, Any], answer: str) -> None:
    used = {n: {"model": "m", "device": f"gpu {n}", "op_times": ""} for n in summaries}
    section = run_section({"name": "x", "scenarios": summaries, "deployments": used})
    assert section.answer.startswith("a: 10.00 ") and section.answer.endswith(answer)
    assert section.question.startswith("How do a" if len(summaries) > 1 else "How does a serve m")
    assert section.tables[0].headings == ("metric", "unit", *summaries)


def test_a_row_of_a_run_has_as_many_decimals() -> None:
    runs = {"a": one(tokens=1234.5), "b": one(tokens=98.7)}
    runs["a"]["makespan_s_band"], runs["b"]["makespan_s_band"] = [9.0, 123.4], [1.0, None]
    rows = {row[0]: row[2:] for row in run_section({"name": "x", "scenarios": runs}).tables[0].rows}
    assert rows["output token throughput"] == ["1,234.5", "98.7"]
    assert rows["makespan, 90 % band"] == ["9.00 to 123.40", "1.00 to overload"]


Breakdown = dict[str, Any]


def breakdown(total_a: float, total_b: float, parts: dict[str, tuple[float, float]]) -> Breakdown:
    def row(a: float, b: float) -> dict[str, float]:
        return {"a_s": a, "b_s": b, "difference_s": b - a}

    rows = {name: row(a, b) for name, (a, b) in parts.items()}
    return {"total": row(total_a, total_b), "parts": rows}


def compared(wall: Breakdown, latency: Breakdown | None = None, **more: Any) -> dict[str, Any]:
    found = {"a": "one/orca", "b": "two/sarathi", "policies": ["orca", "sarathi"], "notes": []}
    found |= {"same_requests": True, "assumed": {}, "summaries": {"A": one(), "B": one(ttft=3.0)}}
    return found | {"wall": wall, "mean_latency": latency or wall} | more


PARTS = breakdown(10.0, 15.0, {"linear": (9.0, 13.0), "pb1": (1.0, 2.0)})


def test_the_sentence_of_a_comparison_is_of_latencies_and_their_tails() -> None:
    """The makespan, which the arrivals set, is in a table alone."""
    section = comparison_section(compared(PARTS, same_requests=False))
    assert section.answer == (
        "orca (A): 10.00 output tokens/s, time to first token p50 1.00 s, p99 2.00 s, time between "
        "tokens p50 0.05 s, p99 0.1 s; sarathi (B): 10.00 output tokens/s, time to first token p50 "
        "1.50 s, p99 3.00 s, time between tokens p50 0.05 s, p99 0.1 s; mean latency, B - A: +5 s, "
        "the largest part linear ops (+4 s); winner: not known from one seed (use three)."
    )
    assert section.warnings == ["A and B serve different requests."]
    assert section.tables[0].rows[:4] == [
        ["time to first token, median", "s", "1.00", "1.50", "+50.0 %"],
        ["time to first token, p99", "s", "2.00", "3.00", "+50.0 %"],
        ["time between tokens, median", "s", "0.0500", "0.0500", "+0.0 %"],
        ["time between tokens, p99", "s", "0.100", "0.100", "+0.0 %"],
    ]
    assert [table.title.split(",")[0] for table in section.tables[1:]] == [
        *("Latency of a request (mean)", "Wall clock")
    ]


@pytest.mark.parametrize(
    ("latency", "said"),
    [
        # What goes the other way is no part of it.
        (breakdown(10.0, 11.0, {"linear": (9.0, 4.0), "pb1": (1.0, 7.0)}), "PB1: prefills"),
        (breakdown(11.0, 10.0, {"linear": (4.0, 9.0), "pb1": (7.0, 1.0)}), "PB1: prefills"),
        (breakdown(10.0, 9.95, {"linear": (10.0, 9.95)}), ""),  # within 1 %
    ],
)
def test_the_largest_part_of_a_difference(latency: Breakdown, said: str) -> None:
    answer = comparison_section(compared(PARTS, latency)).answer
    assert f"largest part {said}" in answer if said else "largest part" not in answer


def test_of_a_difference_near_nothing_no_shares_are_printed() -> None:
    """1.37 s of 0.05 s would be +2740 %: parts that cancel."""
    near = breakdown(807.9, 807.95, {"linear": (800.0, 801.37), "decode_attention": (7.9, 6.58)})
    nothing = breakdown(0.0, 0.0, {"linear": (0.0, 0.0)})
    first, last = comparison_section(compared(near, PARTS)).tables[1:]
    assert [row[-2:] for row in first.rows[::2]] == [
        ["+40.0 %", "+80.0 %"],
        ["+50.0 %", "+100.0 %"],
    ]
    assert last.rows[0] == ["linear ops", "800.0000", "801.3700", "+1.3700", "+0.2 %", "-"]
    assert last.rows[-1] == ["total", "807.9000", "807.9500", "+0.0500", "+0.0 %", "-"]
    assert comparison_section(compared(nothing)).tables[1].rows[-1][-2:] == ["-", "-"]


@pytest.mark.slow
def test_the_folder_is_written_whole(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "difference"
    words = ("compare", result / "orca", result / "sarathi", "--out", out)
    done = called(*words)
    assert f"written: {out}" in done.stdout
    assert summary_of(out)["wall"]["total"]["a_s"] > 0
    with Image.open(out / "figures" / "comparison.png") as image:
        assert len(image.convert("RGB").getcolors(maxcolors=2**24) or []) > 20
    called(*words)  # an earlier one is replaced
    done = called(*words[:-1], result, code=2)
    assert "is a result of another kind" in done.stderr


def test_an_overloaded_run_is_named(tmp_path: Path) -> None:
    changes = ["workload.requests=100", "workload.arrivals.rate=6"]
    sim.run(load_experiment("first_experiment", changes), out=tmp_path / "run", figures=False)
    found = compare(tmp_path / "run" / "orca", tmp_path / "run" / "sarathi")
    section = comparison_section(found)
    (traffic, arrivals, *others), notes = section.assumed, section.warnings
    assert traffic.startswith("traffic: prompts: mean ") and "P50" in traffic
    assert arrivals == "arrivals: Poisson, 6 requests/s"
    assert any(line.startswith("engine: ") and line.endswith("(of B)") for line in others)
    assert len(notes) == 2
    assert all("overloaded: its queue grows" in note for note in notes)
    assert "time to first token" not in section.answer and "overloaded; sarathi" in section.answer


@pytest.mark.slow
def test_the_frontend_is_part_of_a_latency_as_in_the_summary(tmp_path: Path) -> None:
    """The clock runs from t = 0, and so is not the makespan, which begins at the first arrival."""
    (tmp_path / "c.yaml").write_text(
        """
        name: frontend
        model: llama-3-8b
        device: a100-80g-sxm
        workload: {requests: 20, lengths: {kind: uniform, min: 64, max: 900}, pd_ratio: 2,
                   arrivals: {kind: poisson, rate: 5}}
        cluster: {max_length: 1024}
        policy: {name: vllm}
        scenarios: {none: {}, host: {engine: {frontend_s: 0.05, host_iteration_s: 0.002}}}
        """
    )
    sim.run(load_experiment(tmp_path / "c.yaml"), out=tmp_path / "run", figures=False)
    found = compare(tmp_path / "run" / "none", tmp_path / "run" / "host")
    written = summary_of(tmp_path / "run")["scenarios"]
    for side, name in (("a_s", "none"), ("b_s", "host")):
        total = {key: found[key]["total"][side] for key in ("wall", "mean_latency")}
        assert total["mean_latency"] == pytest.approx(written[name]["latency_s"]["mean"], rel=1e-9)
        assert total["wall"] > written[name]["makespan_s"]
    parts = found["mean_latency"]["parts"]
    assert parts["frontend"] == {"a_s": 0.0, "b_s": 0.05, "difference_s": 0.05}
