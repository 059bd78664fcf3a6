"""Terminal, JSON and HTML say the same."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.capacity import options
from sarathi_sim.experiments.cli.app import app
from sarathi_sim.experiments.cli.common import print_section
from sarathi_sim.experiments.content import Section, SortableTable, thinned, topic_of

# Poisson arrivals and two requests at a time: short runs differ, so there is much to warn of.
SERVER = """\
name: server
model: llama-13b
device: a6000
workload:
  requests: 120
  lengths: {kind: fixed, prompt: 200, decode: 8}
  arrivals: {kind: poisson, rate: 0.5}
cluster: {max_length: 512}
batching: {max_batch: 2}
policy: {name: sarathi, chunk_size: 256}
"""
SEARCHED = """\
capacity:
  slo: p90 ttft 500ms
  tolerance: 0.03
  requests: 200
  replications: {least: 2, most: 2}
"""
ASKED = {
    "run": ["run", "server.yaml", "--no-figures"],
    "capacity": ["capacity", "searched.yaml", "--no-bands", "--workers", "1"],
    "recommend": [
        *("recommend", "--model", "llama-13b", "--device", "a6000", "--gpus", "2"),
        *("--slo", "p90 ttft 1s", "--workload", "256:8", "--budget", "128", "--seqs", "2,4"),
        *("--tolerance", "0.05", "--workers", "1"),
    ],
    "sensitivity": [
        *("sensitivity", "server.yaml", "--metric", "makespan_s", "--replications", "1"),
        *("--only", "all ops,output lengths", "--by", "0.01", "--workers", "1"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ASKED)
def test_terminal_json_and_page_say_the_same(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for most in ("LEAST_REQUESTS", "FINEST_REQUESTS", "PILOT_REQUESTS"):
        monkeypatch.setattr(options, most, 400)  # of recommend, which chooses its runs itself
    Path("server.yaml").write_text(SERVER)
    Path("searched.yaml").write_text(SERVER + SEARCHED)
    done = CliRunner().invoke(app, [*ASKED[command], "--out", "out", "--json"])
    assert done.exit_code == 0, done.stderr
    content, told = json.loads(done.stdout), done.stderr.splitlines()
    stored = json.loads(Path("out/summary.json").read_bytes())
    words = {key: content[key] for key in ("question", "answer", "assumptions", "warnings")}
    assert words == {key: stored[key] for key in words}
    assert words["assumptions"] and words["warnings"]

    began = told.index(words["answer"])
    lines = [line.partition(": ") for line in told[began:]]
    block = told.index("Assumed", began) + 1
    printed = told[block : told.index("", block)]
    for said, line in zip(words["assumptions"], printed, strict=True):
        topic, text = topic_of(said)
        assert line.startswith(f"  {topic} ") and line.endswith(f"  {text}")
    assert [rest for mark, _, rest in lines if mark == "warning"] == words["warnings"]
    first_table = next(n for n, line in enumerate(told) if line.startswith("┏"))
    warned = [n for n, line in enumerate(told) if line.startswith("warning: ")]
    assert began < first_table < min(warned)

    done = CliRunner().invoke(app, ["report", "out", "--out", "page.html"])
    assert done.exit_code == 0, done.stderr
    page = Path("page.html").read_text()
    (question,) = re.findall("<h2>(.*?)</h2>", page)
    (answer,) = re.findall('<p class="answer">(.*?)</p>', page)
    (assumed,) = re.findall('<details class="assumed".*?</details>', page, re.DOTALL)
    (aside,) = re.findall('<div class="warnings">.*?</div>', page, re.DOTALL)
    assert [html.unescape(text) for text in (question, answer)] == [
        *(words["question"], words["answer"])
    ]
    drawn = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", assumed)
    said = [topic_of(one) for one in words["assumptions"]]
    assert [tuple(map(html.unescape, one)) for one in drawn] == said
    items = [html.unescape(text) for text in re.findall("<li>(.*?)</li>", aside)]
    assert items == words["warnings"]
    assert page.index(assumed) < page.index(aside) < page.index("<table>")


def test_what_is_drawn_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup; a long table of details ends with the number of its further rows."""
    table = SortableTable("T", ("a [b]", "n"), [["[red]x", str(n)] for n in range(32)], "Noted.")
    section = Section("run", "r", "?", "Is [bold]so[/].", table, details=[table], warnings=["[w]"])
    print_section(section)
    told = capsys.readouterr().out
    assert told.startswith("Is [bold]so[/].\n")
    assert "a [b]" in told and told.count("[red]x") == 32 + 30
    assert "And 2 more: see --json. Noted." in told
    assert told.endswith("warning: [w]\n")


def test_many_notes_that_differ_in_numbers_are_one() -> None:
    blocks = [f"{count:,} KV blocks a replica" for count in range(28_000, 28_005)]
    assert thinned([*blocks, "op times: all modelled", *blocks]) == [
        *(blocks[0], "and 4 more like this, with other numbers", "op times: all modelled")
    ]
    assert thinned(blocks[:3]) == blocks[:3]
