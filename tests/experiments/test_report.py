"""Reports: one page of each kind of result, its numbers, and the files it may replace."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from bokeh.models import TapTool

from sarathi_sim.experiments.report.capacity_charts import capacity_charts
from sarathi_sim.experiments.report.page import interactive, page, write_report
from sarathi_sim.experiments.report.section import Axis, Chart, Section, Series, anchor
from sarathi_sim.experiments.report.sections import sections_of
from sarathi_sim.experiments.report.timeline import boxes_window, busy_shares
from sarathi_sim.experiments.results import read_summary
from sarathi_sim.experiments.run.compare import simulate_again
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metric_registry import known
from tests.experiments.small_config import called, refused
from tests.experiments.small_report import ALL_KINDS

PAGE = re.compile(r"<script.*?</script>", re.DOTALL)


@pytest.fixture(scope="module")
def sections(reported: dict[str, Path]) -> dict[str, Section]:
    return {kind: sections_of([folder])[0] for kind, folder in reported.items()}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_has_its_parts(sections: dict[str, Section], kind: str) -> None:
    section = sections[kind]
    assert section.question.endswith("?")
    assert section.answer.endswith(".")
    assert section.tables[0].rows
    assert section.charts
    for grid in section.tables:
        assert {len(row) for row in grid.rows} == {len(grid.headings)}


def test_the_numbers_of_a_run(sections: dict[str, Section], reported: dict[str, Path]) -> None:
    section, summary = sections["run"], read_summary(reported["run"])["scenarios"]
    assert list(section.tables[0].headings[2:]) == list(summary) == ["orca", "sarathi"]
    rows = {row[0]: row[1:] for row in section.tables[0].rows}
    for label, key, factor, unit in (
        ("makespan", "makespan_s", 1, "s"), ("model FLOPs utilisation", "mfu", 100, "%")
    ):  # fmt: skip
        exact = [factor * numbers[key] for numbers in summary.values()]
        assert rows[label][0] == unit
        assert [float(cell) for cell in rows[label][1:]] == pytest.approx(exact, rel=5e-3)
    tokens = known("output_tokens_per_s").text(summary["sarathi"]["output_tokens_per_s"])
    assert f"; sarathi: {tokens} output tokens/s, time to first token p99" in section.answer
    assert section.answer.endswith(
        "arrivals: all at once; winner: not known from one seed (use three)."
    )
    titles = [chart.title for chart in section.charts]
    wanted = {"Time to first token", "Timeline of the stages: orca", "The whole run: orca"}
    assert wanted | {"Bubble time of requests"} <= set(titles)  # it has a pipeline
    origins = next(grid for grid in section.tables[1:] if grid.title.startswith("Op times"))
    sends = "transfers between stages inter node"
    assert {row[1] for row in origins.rows} >= {"QKV projection", "attention of decodes", sends}
    assert all(0 < float(row[3]) < 100 for row in origins.rows)
    assert "policy:" in section.configuration["run/config.yaml"]


def test_the_parts_of_a_comparison(sections: dict[str, Section], reported: dict[str, Path]) -> None:
    section, found = sections["comparison"], read_summary(reported["comparison"])
    assert "orca (A): " in section.answer and "sarathi (B): " in section.answer
    for table, key in zip(section.tables[1:], ("mean_latency", "wall"), strict=True):
        assert float(table.rows[-1][1]) == pytest.approx(found[key]["total"]["a_s"], abs=1e-4)
        parts = [float(row[3].replace(",", "")) for row in table.rows]
        assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=2e-3)


def test_recorded_runs(sections: dict[str, Section]) -> None:
    section = sections["recorded"]
    assert section.answer.startswith("inside the 90 % band: 2 of 4 numbers; largest error: ")
    assert [grid.title for grid in section.tables[1:3]] == ["first", "second"]
    assert [list(bars.x) for bars in section.charts[0].series] == [[-12.5, -12.5], [1.0, 2.0]]


def test_capacities(sections: dict[str, Section]) -> None:
    section = sections["capacity"]
    assert section.question.endswith("sustain under the SLO p99 ttft 1s?")
    assert section.warnings[2] == "TP 1: no capacity: does not fit"
    assert section.warnings[3].startswith("no errors of op times: ")
    assert section.configuration == {"config.yaml": "name: layouts\n"}
    assert section.charts[0].title == "Headroom: p99 ttft 1s"
    assert section.charts[0].y.ends == (0.0, 2.1)  # a probe at three times the limit is cut


def test_what_a_relaxed_slo_saves(sections: dict[str, Section]) -> None:
    """A step at each load that the next limits allow, at 1 / load of the cost."""
    chart = sections["capacity"].charts[-1]
    assert chart.title.startswith("cost of a million output tokens against factor on all")
    steps = [one for one in chart.series if one.kind == "step" and one.name != "the front"]
    assert [one.x.tolist() for one in steps] == [[0.4, 1.0, 3.0]] * 2
    costs = min(one.y.tolist() for one in steps)
    assert costs == pytest.approx([2 * 4.6296, 4.6296, 4.6296 / 1.1], rel=1e-4)


def test_a_chart_of_many_deployments_says_which_it_leaves_out(reported: dict[str, Path]) -> None:
    found = read_summary(reported["capacity"])
    (one,) = [row for row in found["deployments"] if row["name"] == "TP 8"]
    many = [one | {"name": f"server {n}", "capacity": float(n)} for n in range(9)]
    for charts in capacity_charts(found | {"deployments": many}).values():
        for chart in charts:
            drawn = {line.name for line in chart.series if line.name.startswith("server")}
            assert drawn == {f"server {n}" for n in range(3, 9)}
            assert chart.caption.endswith(" those with the highest capacity are drawn.")


def test_recommendations(sections: dict[str, Section]) -> None:
    section = sections["recommend"]
    what = "Which deployment of llama-13b sustains the highest load for its price on 8 GPUs (a6000"
    assert section.question.startswith(what)
    titles = [chart.title.split(" against ")[0] for chart in section.charts]
    fronts = ("output tokens/s per GPU", "time between tokens, p99 (s)")
    assert titles == ["Headroom: p99 ttft 1s", *fronts, "cost of a million output tokens"]
    assert [grid.title for grid in section.tables[1:]] == [
        *("Searched", "Short runs only", "Left out", "Every point")
    ]
    assert section.configuration == {"winner.yaml": "name: winner\n"}
    assert section.command == "vllm serve llama-13b"


def test_sensitivities(sections: dict[str, Section]) -> None:
    section = sections["sensitivity"]
    assert section.question == "What changes output token throughput (tokens/s) most?"
    strongest = r".*, [\d.]+: output lengths \+0\.\d\d % per \+1 %; next: attention of "
    assert re.match(strongest, section.answer)
    cells = {row[0]: row for row in section.tables[0].rows}
    assert set(section.charts[0].y.rows) == set(cells), "of one name in table and chart"
    assert cells["all ops"][1:5] == ["ops", "+11.11 %", "-9.09 %", "-1.000"]
    assert section.tables[0].headings[:2] == ("factor", "kind") and "attention of prompts" in cells
    assert [chart.title for chart in section.charts] == [section.answer.split(":")[0]]
    assert [grid.title for grid in section.tables[1:]] == ["Op times: origin and error"]
    assert "model: llama-13b" in section.configuration["config.yaml"]


@pytest.mark.parametrize("kind", ["sweep", "capacity", "recommend"])
def test_every_point_leads_to_its_row(sections: dict[str, Section], kind: str) -> None:
    section = sections[kind]
    rows = {name for grid in section.tables for name in grid.anchors}
    fronts = [chart for chart in section.charts if " against " in chart.title]
    assert rows and fronts
    assert any("over largest batch" in one.title for one in section.charts) == (kind == "sweep")
    for front in fronts:
        (tap,) = interactive(front).select({"type": TapTool})
        assert tap.callback.url == "#@link"
        sources = [drawn.data_source.data for drawn in tap.renderers]
        assert {name for data in sources for name in data["link"]} <= rows
        points = [one for one in front.series if one.links]
        assert [len(one.texts) for one in points] == [len(data["x"]) for data in sources]
        if kind == "sweep":
            continue
        cells = dict(zip(section.tables[-1].anchors, section.tables[-1].rows, strict=True))
        assert any(text for one in points for text in one.texts) == (
            not front.title.startswith("cost")
        )
        for one in points:
            for name, text in zip(one.links, one.texts, strict=True):
                assert text in ("", cells[anchor(name)][3])


def test_several_runs_are_one_section(result: Path, tmp_path: Path) -> None:
    shutil.copytree(result, tmp_path / "other")
    (section,) = sections_of([result, tmp_path / "other"])
    assert len(section.tables[0].headings) == 2 + 4
    assert set(section.tables[0].headings) >= {"run/orca", "other/sarathi"}
    assert [grid.title for grid in section.tables[1:]].count("Ratios") == 2


@pytest.mark.slow
def test_the_page_asks_for_nothing_and_is_small(sections: dict[str, Section]) -> None:
    text = page("All", list(sections.values()))
    assert len(text.encode()) < 6_000_000
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|<(link|img|iframe|script[^>]* src)", PAGE.sub("", text))
    assert text.count("<section>") == len(sections)
    items = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert items is not None
    places = text.count('<figure class="chart"')
    assert len(json.loads(items[1])) == places
    together = {c.title.partition(": ")[0] for one in sections.values() for c in one.charts}
    assert len(together) <= places < sum(len(one.charts) for one in sections.values())


def test_what_a_user_wrote_is_text(sections: dict[str, Section]) -> None:
    evil = "</script><script>alert(1)</script><!-- <b>&amp;"
    section = replace(sections["run"], name=evil, about=evil, answer=evil, warnings=[evil])
    text = page(evil, [section])
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


class Scripts(HTMLParser):
    """What a browser sees of a page: scripts that run, and attributes that would."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.handlers: list[str] = []
        self.policy = ""
        self._runs = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.handlers += [name for name in found if name.startswith("on")]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        self._runs = tag == "script" and "type" not in found
        if self._runs:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._runs = False

    def handle_data(self, data: str) -> None:
        if self._runs:
            self.scripts[-1] += data


@pytest.mark.parametrize(
    "evil", ["</SCRIPT><img src=x onerror=alert(1)>", "</script ><b>", "<!--<script>", "]]><svg/>"]
)
def test_no_text_of_a_chart_ends_its_script(sections: dict[str, Section], evil: str) -> None:
    curve = Series("line", evil, np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    charts = [Chart(evil, Axis(evil), Axis(evil), [curve], evil)]
    section = replace(sections["run"], charts=charts)
    text = page("A", [section])
    found = Scripts()
    found.feed(text)
    assert not found.handlers and not {"img", "b", "svg"} & set(found.tags)
    assert found.tags.count("script") == 4
    items = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert items is not None and json.dumps(evil) in json.dumps(json.loads(items[1]))


@pytest.mark.parametrize("ends", [(None, None), (0.0, None), (None, 2.0), (0.0, 2.0)])
def test_an_axis_ends_where_it_is_said(ends: tuple[float | None, float | None]) -> None:
    line = Series("line", "a", [0.0, 1.0], [0.0, 1.0])
    drawn = interactive(Chart("A", Axis("x", ends=ends), Axis("y"), [line]))
    found = (drawn.x_range.start, drawn.x_range.end)
    assert all(end in (None, one) for end, one in zip(ends, found, strict=True))


def test_the_policy_of_the_page_allows_its_own_scripts_only(sections: dict[str, Section]) -> None:
    for one in (sections["run"], replace(sections["run"], charts=[])):
        found = Scripts()
        found.feed(page("A", [one]))
        allowed = re.search(r"script-src ([^;]*);", found.policy)
        assert allowed is not None and "unsafe" not in allowed[1]
        digests = [sha256(script.encode()).digest() for script in found.scripts]
        assert digests
        assert {f"'sha256-{b64encode(d).decode()}'" for d in digests} <= set(allowed[1].split())


@pytest.mark.parametrize(
    ("file", "old", "new", "warning"),
    [
        ("config.yaml", "device: a100-80g-sxm", "device: gone", "orca: no timeline, and no errors"),
        ("summary.json", '"makespan_s": ', '"makespan_s": 9', "profiles or code have changed"),
    ],
)
def test_a_run_that_cannot_be_simulated_again_or_has_changed(
    result: Path, tmp_path: Path, file: str, old: str, new: str, warning: str
) -> None:
    folder = Path(shutil.copytree(result, tmp_path / "run"))
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    (section,) = sections_of([folder])
    assert any(warning in line for line in section.warnings)
    timed = any(chart.title.startswith("Timeline") for chart in section.charts)
    assert timed == (file == "summary.json")
    assert section.answer.startswith("orca: ")


def test_the_boxes_of_a_timeline_are_few(result: Path) -> None:
    again = {name: simulate_again(result, name, name).analysis for name in ("orca", "sarathi")}
    ends = [analysis.records.end_s for analysis in again.values()]
    everything = boxes_window(again.values())
    assert (everything.start_s, everything.length_s) == (0.0, max(ends))
    few = boxes_window(again.values(), most=400)
    assert 0 < few.start_s < few.end_s < min(ends)
    for analysis in again.values():
        edges, shares = busy_shares(analysis, 50)
        busy = (shares * np.diff(edges)).sum() * len(analysis.ledger)
        assert busy == pytest.approx(analysis.ledger["busy_s"].sum())
        assert shares.sum(axis=0).max() <= 1 + 1e-9


def test_the_command(reported: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(reported["score"], tmp_path / "score")
    assert called("report", folder).stdout.startswith(f"written: {tmp_path / 'score.html'}\n")
    first = (tmp_path / "score.html").read_bytes()
    assert first.startswith(b"<!DOCTYPE html>")
    assert called("report", folder, "--title", "Mine", "--quiet").output == ""
    assert b"<title>Mine</title>" in (tmp_path / "score.html").read_bytes()


SEALED, NOT_OURS = "<!-- sarathi-sim report 1", "exists and is not a report of ours"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (f"<p>ours</p>\n{SEALED}", "<p>a page of mine</p>", NOT_OURS),
        ("ours", "mine", "was changed since it was written"),
        ("-->\n", "-->\n<p>a note of mine</p>\n", NOT_OURS),
    ],
)
def test_a_file_of_the_users_stays(
    result: Path, tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = tmp_path / "page.html"
    write_report(path, "<p>ours</p>\n")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    before = path.read_bytes()
    assert problem in refused("report", result, "--out", path)
    with pytest.raises(UserError):
        write_report(path, "other")
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [path]


def test_no_report_lies_in_a_result(result: Path, tmp_path: Path) -> None:
    line = refused("report", result, "--out", result / "r.html")
    assert "which holds a result and only its files" in line
    assert "is a folder" in refused("report", result, "--out", tmp_path)
    assert not (result / "r.html").exists()


@pytest.mark.parametrize("content", ["{}", "[]", "not json", '{"format": "sarathi-sim figures 1"}'])
def test_what_is_no_result(tmp_path: Path, content: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "summary.json").write_text(content)
    line = refused("report", tmp_path / "x")
    assert line.startswith(f"error: {tmp_path / 'x'}: holds")
    assert "no such folder" in refused("report", tmp_path / "y")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("kind", ["comparison", "capacity", "recommend", "sensitivity"])
def test_a_damaged_result(reported: dict[str, Path], tmp_path: Path, kind: str) -> None:
    path = shutil.copytree(reported[kind], tmp_path / "x") / "summary.json"
    summary = json.loads(path.read_bytes())
    keys = {"comparison": "mean_latency", "capacity": "prices", "recommend": "prices"}
    key = keys.get(kind, "measures")
    summary[key] = {"all": {"n": 1}, "total": {}, "parts": {}}
    path.write_text(json.dumps(summary))
    command = "compare" if kind == "comparison" else kind
    assert f"the result of {command} is damaged" in refused("report", tmp_path / "x")


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "score"}'])
def test_a_damaged_section(reported: dict[str, Path], tmp_path: Path, text: str) -> None:
    shutil.copytree(reported["score"], tmp_path / "x")
    (tmp_path / "x" / "section.json").write_text(text)
    assert "x: has no readable section.json" in refused("report", tmp_path / "x")
