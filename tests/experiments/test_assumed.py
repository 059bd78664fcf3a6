"""What an answer rests on is said first, what is in doubt is warned of, and terminal, JSON and HTML
say the same.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.experiments.capacity import options
from sarathi_sim.experiments.capacity.answer import said_of
from sarathi_sim.experiments.capacity.options import Option, Wanted
from sarathi_sim.experiments.capacity.recommend import doubts_by_name
from sarathi_sim.experiments.config.assumptions import assumed
from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.report.render import consoles, terminal
from sarathi_sim.experiments.report.run_answers import run_section
from sarathi_sim.experiments.report.section import (
    Section,
    Table,
    assumed_of,
    thinned,
    topic_of,
)
from sarathi_sim.experiments.run.experiment import deploy_all, simulate_all
from tests.experiments.small_config import called
from tests.experiments.small_laboratory import question, recommendation

MIXTURE: dict[str, Any] = {
    "name": "mixture",
    "model": "qwen3-30b-a3b",
    "device": "h100-80g-sxm",
    "stack": "vllm",
    "dtype": "bf16",
    "workload": {
        "lengths": {"kind": "random", "prompt": 600, "decode": 20, "range_ratio": 0.5},
        "requests": 40,
        "declared": "exact",
    },
    "cluster": {"tp": 2, "max_length": 1024},
    "policy": {"name": "vllm", "max_num_seqs": 64},
}


def deployed(**changes: object) -> Deployment:
    given = {key.replace("__", "."): value for key, value in changes.items()}
    (found,) = deploy_all(load_experiment(MIXTURE, given)).values()
    return found


def lines(deployment: Deployment, searched: str | None = None) -> dict[str, str]:
    return dict(map(topic_of, assumed(deployment, searched)))


def test_every_topic_has_a_line() -> None:
    said = lines(deployed())
    topics = ["traffic", "arrivals", "engine", "formats", "op times", "memory", "host time"]
    assert list(said) == topics
    assert "P50" in said["traffic"] and "P99" in said["traffic"]
    assert said["arrivals"] == "all arrive at once"
    assert said["formats"] == (
        "weights bf16, KV cache bf16, experts bf16; tokens over experts power_law_1.2"
    )


def test_settings_at_their_default_are_listed() -> None:
    said = lines(deployed())["engine"]
    for default in (
        *("async_scheduling on", "version 0.33", "prefix_caching on", "gpu_memory_utilization 0.9"),
        *("CUDA graphs up to 512 tokens", "expert_parallel off", "max_num_batched_tokens 2048"),
    ):
        assert default in said
    assert "max_num_seqs" not in said
    given = lines(
        deployed(
            policy__async_scheduling=False,
            kv_cache={"prefix_caching": False, "gpu_memory_utilization": 0.8},
            cluster__expert_parallel=True,
        )
    )["engine"]
    for key in ("async", "prefix_caching", "gpu_memory_utilization", "expert_parallel"):
        assert key not in given


def test_settings_that_are_varied_are_no_assumption() -> None:
    """Nor do they tell the lines of the deployments apart."""
    few, many = (deployed(policy__max_num_seqs=count) for count in (64, 256))
    found = said_of([Option("few", {}, few), Option("many", {}, many)], "rate")["notes"]
    engine = {topic_of(line)[1] for each in found.values() for line in each if "engine: " in line}
    (line,) = engine
    assert "max_num_seqs" not in line and "max_num_batched_tokens 2048" in line


def test_lines_of_some_say_of_which_and_stand_together() -> None:
    """Many that differ in numbers are one."""
    notes = {name: ["traffic: short", "engine: a"] for name in ("one", "two")}
    notes["three"] = ["traffic: short", "engine: b"]
    assert assumed_of({"notes": notes}) == [
        *("traffic: short", "engine: a (of one and two)", "engine: b (of three)")
    ]
    blocks = [f"{count:,} KV blocks per replica" for count in range(28_000, 28_005)]
    assert thinned([*blocks, "op times: all modelled", *blocks]) == [
        *(blocks[0], "and 4 more like this, with other numbers", "op times: all modelled")
    ]
    assert thinned(iter(blocks)) == [blocks[0], "and 4 more like this, with other numbers"]
    assert thinned(blocks[:3]) == blocks[:3]


# recommend -----------------------------------------------------------------------------------


wanted = partial(
    question,
    **{"device": "h200-sxm", "slo": "p99 ttft 1s", "gpus": 8, "max_length": 4096},
    **{"dtype": "fp8_block", "budget": "2048", "seqs": "256"},
)


def answered(asked: Wanted, **given: object) -> Section:
    return recommendation(workload=asked.stated, not_tried=asked.not_tried, **given)


def test_azures_conversations_are_named_where_no_workload_was_given() -> None:
    asked = wanted(model="llama-3.1-8b")
    shipped = wanted(model="llama-3.1-8b", workload="capacity_llama3_70b")
    assert asked.workload == shipped.workload
    azure = "workload: Azure's conversation trace of 2023, as none was given"
    assert answered(asked).assumed[0] == azure
    assert not any("Azure" in line for line in answered(shipped).assumed)


# fp8 -----------------------------------------------------------------------------------------


def test_expert_parallelism_is_a_layout_of_mixtures() -> None:
    shapes = [
        (tree["cluster"]["tp"], tree["cluster"].get("expert_parallel"), point["layout"])
        for point, tree in options.layouts(wanted(model="deepseek-v3", workload="1024:128"))
        if tree["cluster"]["pp"] == 1 and "dp" not in tree["cluster"]
    ]
    assert shapes == [
        (1, None, "TP 1 budget 2048"),
        *((2, False, "TP 2 budget 2048"), (2, True, "TP 2 EP budget 2048")),
        *((4, False, "TP 4 budget 2048"), (4, True, "TP 4 EP budget 2048")),
        *((8, False, "TP 8 budget 2048"), (8, True, "TP 8 EP budget 2048")),
    ]
    dense = options.layouts(wanted(model="llama-3.1-8b", workload="1024:128"))
    assert not any("expert_parallel" in tree["cluster"] for _, tree in dense)


def test_fp8_experts_on_hopper_are_warned_of_and_have_a_wide_band() -> None:
    """Vllm's table of them is slower than that of bf16: the band holds the time of fp8_block."""
    tables = {"stack": "vllm@0.24"}  # the very version: no drift widens the other ops' bands
    made = {
        dtype: load_experiment(MIXTURE, tables | {"dtype": dtype}) for dtype in ("fp8", "fp8_block")
    }
    found = {dtype: simulate_all(one).summary() for dtype, one in made.items()}
    span = {dtype: one["scenarios"]["mixture"]["makespan_s"] for dtype, one in found.items()}
    low, high = found["fp8"]["scenarios"]["mixture"]["makespan_s_band"]
    assert low < span["fp8_block"] < span["fp8"] < high
    (warning,) = (one for one in run_section(found["fp8"]).warnings if one.startswith("experts: "))
    assert "times as long as in bf16" in warning and "give dtype fp8_block" in warning
    assert not any("fp8_block" in one for one in run_section(found["fp8_block"]).warnings)
    narrow = found["fp8_block"]["scenarios"]["mixture"]["makespan_s_band"]
    assert narrow[1] / narrow[0] < min(1.2, 0.7 * high / low)


def test_recommend_warns_of_fp8_even_where_it_was_dropped() -> None:
    options = [Option(name, {}, deployed(dtype="fp8")) for name in ("TP 2", "TP 2 EP")]
    options.insert(0, Option("bf16", {}, deployed()))
    doubts = doubts_by_name(options)
    assert list(doubts) == ["TP 2"]
    (warning,) = answered(wanted(model="llama-3.1-8b", workload="1024:128"), doubts=doubts).warnings
    assert "give dtype fp8_block" in warning


# In three places --------------------------------------------------------------------------------

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
    "run": "run server.yaml --no-figures",
    "capacity": "capacity searched.yaml --no-bands --workers 1",
    "recommend": "recommend --model llama-13b --device a6000 --gpus 2 --slo 'p90 ttft 1s' "
    "--workload 256:8 --budget 128 --seqs 2,4 --set tolerance=0.05 --workers 1",
    "sensitivity": "capacity server.yaml --sensitivity --metric makespan_s --replications 1 --only "
    "'all ops,output lengths' --by 0.01 --workers 1",
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
    done = called(*shlex.split(ASKED[command]), "--out", "out", "--json", "--verbose")
    content, told = json.loads(done.stdout), done.stderr.splitlines()
    stored = json.loads(Path("out/summary.json").read_bytes())
    words = {key: content[key] for key in ("question", "answer", "assumptions", "warnings")}
    assert words == {key: stored[key] for key in words}
    assert words["assumptions"] and words["warnings"]

    began, block = told.index(words["answer"]), told.index("Assumed")
    last = told.index("Keep in mind")
    for said, line in zip(words["assumptions"], told[block + 1 : last], strict=True):
        topic, text = topic_of(said)
        assert line.startswith(f"  {topic} ") and line.endswith(f"  {text}")
    warned = [f"  {line}" for line in words["warnings"]]
    assert told[last + 1 :][: len(warned)] == warned
    assert began < next(n for n, line in enumerate(told) if "──" in line) < block

    called("report", "out", "--out", "page.html")
    page = Path("page.html").read_text()
    (question,) = re.findall("<h2>(.*?)</h2>", page)
    (answer,) = re.findall('<p class="answer">(.*?)</p>', page)
    (assumed,) = re.findall('<details class="assumed".*?</details>', page, re.DOTALL)
    (aside,) = re.findall('<div class="warnings">.*?</div>', page, re.DOTALL)
    assert html.unescape(question) == words["question"]
    assert html.unescape(answer) == words["answer"]
    drawn = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", assumed)
    said = [topic_of(one) for one in words["assumptions"]]
    assert [tuple(map(html.unescape, one)) for one in drawn] == said
    items = [html.unescape(text) for text in re.findall("<li>(.*?)</li>", aside)]
    assert items == words["warnings"]
    assert page.index(aside) < page.index("<table>") < page.index(assumed)


def test_a_terminal_shows_text() -> None:
    """Brackets are no markup; a long table ends with the number of its further rows; without
    verbose there are one table and three lines of each kind."""
    table = Table("T", ("a [b]", "n"), [["[red]x", str(n)] for n in range(32)], "Noted.")
    lines = [f"[w]{n}" for n in range(4)]
    section = Section("run", "r", "?", "Is [bold]so[/].", [table, table], warnings=lines)
    console = consoles()[0]
    told = terminal(section, console, verbose=True)
    assert told.startswith("Is [bold]so[/].\n")
    assert told.count("a [b]") == 2 and told.count("[red]x") == 2 * 32
    assert told.endswith("Keep in mind\n  [w]0\n  [w]1\n  [w]2\n  [w]3\n")
    told = terminal(section, console, rest="rows.csv")
    assert told.count("[red]x") == 30 and "And 2 more: see rows.csv. Noted." in told
    assert told.endswith("[w]2\nFurther 1 table and 1 warning: --verbose\n")
