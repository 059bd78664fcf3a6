"""`reproduce` and `advise`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli.app import app
from experiments.config.errors import ConfigError
from experiments.paper.claims import pick_claims
from experiments.paper.decode_speedup import TABLE_4
from experiments.paper.figures import bubbles as figures_pipeline
from experiments.paper.figures import chunks as figures_chunks
from experiments.paper.figures import costs as figures_costs
from experiments.paper.figures import gallery
from experiments.paper.figures.gallery import _save
from experiments.paper.reproduce import reproduce
from experiments.paper.variants import VARIANTS, Lab
from experiments.run.advise import FIXED, advise, explain
from experiments.run.demand import Demand, parse_demand
from experiments.run.machine import Machine
from policies.sarathi import Sarathi


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def a6000() -> Machine:
    return Lab("predicted").a6000


def test_reproduce_writes_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "write_gallery", lambda *_: None)  # it takes a minute
    out = tmp_path / "out"
    words = ("reproduce", "tile_257", "tp_batch", "--out", str(out))
    code, output = invoke(*words)
    assert code == 0
    content = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    rows = content["claims"]
    assert [(row["id"], row["variant"]) for row in rows] == [
        (id, variant) for id in ("tile_257", "tp_batch") for variant in VARIANTS
    ]
    assert "predicted: 2 of 2 reproduced" in output
    assert [row["status"] for row in rows] == ["predicted", "fitted", "predicted", "predicted"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"claims": rows}), done.output


def test_reproduce_of_one_variant() -> None:
    code, output = invoke("reproduce", "tp_batch", "--variant", "predicted")
    assert code == 0 and "paper-calibrated" not in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense",), "nonsense: no such claim"),
        (("tp_batch", "--variant", "predict"), "did you mean predicted"),
        (("tp_batch", "--json", "out.json"), "out.json: no such claim"),
    ],
)
def test_mistakes_give_one_message(words: tuple[str, ...], said: str) -> None:
    code, output = invoke("reproduce", *words)
    assert code == 2 and said in output and len(output.strip().splitlines()) == 1


def test_list_says_how_each_claim_is_read() -> None:
    code, output = invoke("reproduce", "--list")
    claims = [line for line in output.splitlines() if not line.startswith(" ")]
    assert code == 0 and len(claims) == 67 and all(" (section " in line for line in claims)


def test_figures_are_drawn(tmp_path: Path) -> None:
    labs = [Lab(variant) for variant in VARIANTS]
    for draw in (
        figures_chunks.attention_mask,
        figures_costs.tile_quantisation,
        figures_pipeline.bubble_schedule,
    ):
        file = tmp_path / f"{draw.__name__}.png"
        _save(lambda draw=draw: draw(labs), file)  # type: ignore[misc]
        assert 10_000 < file.stat().st_size < 130_000
    assert len(list(tmp_path.iterdir())) == 3


def test_what_was_served_for_the_claims_is_not_served_again_for_the_gallery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table 4 is drawn from six claims; what the figures show besides is left out here."""
    served, serve = [], Machine.serve
    monkeypatch.setattr(
        Machine, "serve", lambda self, *words: served.append(words) or serve(self, *words)
    )
    monkeypatch.setattr(gallery, "FIGURES", {})
    monkeypatch.setattr(gallery, "_curves", lambda _: {})
    monkeypatch.setattr(gallery, "_save", lambda *_: None)
    labs = [Lab(name) for name in VARIANTS]
    gains = reproduce(pick_claims(f"peak_{row}_gain" for row in TABLE_4), labs)
    assert len(served) == 2 * len(gains) == 24, "ours and the baseline"
    gallery.write_gallery(tmp_path, labs, None, lambda *_: None)
    assert len(served) == 24
    assert all(f"{gain.ours:.2f}" in (tmp_path / "tables.md").read_text() for gain in gains)


def test_the_schedule_has_the_papers_bubbles(a6000: Machine) -> None:
    """Under Orca the four requests leave more bubbles than under Sarathi (section 3.2)."""
    lab = Lab("predicted")
    lost = [
        figures_pipeline.four_requests(lab, policy).ledger[["pb1_s", "pb2_s", "pb3_s"]].sum().sum()
        for policy in (figures_pipeline.Orca(max_prefills=1), Sarathi(256))
    ]
    assert lost[0] > 3 * lost[1] > 0


# advise -------------------------------------------------------------------------------------------


def test_advice_on_the_papers_settings() -> None:
    """1K, B = 18, at the paper's P:D: chunk 256, in five lines."""
    code, output = invoke(
        *("advise", "--model", "llama-13b", "--device", "a6000"),
        *("--workload", "1K:14", "--batch", "18"),
    )
    lines = output.strip().splitlines()
    assert code == 0 and len(lines) == 5
    assert lines[0].startswith("best: chunk 256, batch 18")
    assert [line.partition(" ")[0] for line in lines[1:]] == ["why:", "limited", "next:", "regret:"]
    assert "fixed 256 0.0 %" in lines[-1]


@pytest.mark.parametrize(
    "demand", [Demand(1024, 14, 14), Demand(1024, 5, 50), Demand(2048, 27, 27)]
)
def test_nothing_simulated_beats_the_advice(a6000: Machine, demand: Demand) -> None:
    """Against every chunk at the largest batch, on the same requests: at most 1 % is left."""
    found = advise(a6000, demand, batch_cap=10)
    prompt, output = demand.requests(360)
    tokens = int((prompt + output).sum())
    rates = [
        tokens / a6000.run(Sarathi(chunk, 128, "reserve"), 10, prompt, output).end_s
        for chunk in (128, 256, 384, 512, 640, 768, 1024)
    ]
    assert found.verified[0].tokens_per_s >= 0.99 * max(rates)
    for number, chunk in enumerate(FIXED):
        rate = rates[(1, 3)[number]]
        assert found.regret(chunk) == pytest.approx(
            100 * (1 - rate / found.verified[0].tokens_per_s)
        )


def test_the_closed_form_is_near_the_simulation(a6000: Machine) -> None:
    """Where prompts are whole chunks and decodes fill the batch, within 5 %."""
    found = advise(a6000, Demand(1024, 14, 14), batch_cap=18)
    for checked in found.verified[:2]:
        assert 1024 / checked.candidate.seconds == pytest.approx(checked.tokens_per_s, rel=0.05)


def test_a_limit_on_the_time_between_tokens_is_kept(a6000: Machine) -> None:
    demand = Demand(1024, 28, 28)
    free = advise(a6000, demand, batch_cap=18)
    limited = advise(a6000, demand, batch_cap=18, tbt_limit_s=0.11)
    assert free.excluded is None and free.verified[0].tbt_p99_s > 0.11
    assert limited.excluded is not None
    assert all(v.candidate.tbt_s <= 0.11 and v.tbt_p99_s <= 0.115 for v in limited.verified)
    assert limited.verified[0].tokens_per_s < free.verified[0].tokens_per_s
    with pytest.raises(ConfigError, match="no chunk and batch meets it"):
        advise(a6000, demand, tbt_limit_s=0.001)


@pytest.mark.parametrize(("ratio", "term"), [(2, "P:D balance"), (14, "prefill efficiency")])
def test_the_limiting_term_is_named(a6000: Machine, ratio: float, term: str) -> None:
    """Few prompt tokens leave decodes without a chunk; at the balance it is the chunk's size."""
    found = advise(a6000, Demand(1024, ratio, ratio), batch_cap=18)
    assert explain(found)[2].startswith(f"limited by {term}")


def test_a_batch_that_does_not_fit(a6000: Machine) -> None:
    with pytest.raises(ConfigError, match="--batch 30: does not fit: at most 20"):
        advise(a6000, Demand(1024, 14, 14), batch_cap=30)


def test_how_demand_is_written() -> None:
    assert parse_demand("1K:14") == Demand(1024, 14, 14)
    assert parse_demand("1.5k:5..50") == Demand(1536, 5, 50)
    assert parse_demand("700:?") == Demand(700, 1, 200)
    for text in ("", "1K", "1K:", "1K:x", "1K:0", "1K:50..5", "1:14", "9K:14", "0.3:2", "1K:nan"):
        with pytest.raises(ConfigError, match="expected LENGTH:PD"):
            parse_demand(text)


def test_samples_have_the_ratios_asked_for() -> None:
    prompt, output = Demand(1024, 5, 50).requests(300)
    assert ((prompt + output) == 1024).all()
    ratio = prompt / output
    assert 4.5 < ratio.min() < 6 and 40 < ratio.max() < 51


def test_one_request_at_a_time() -> None:
    """LLaMA-33B leaves an A100 room for a single sequence of 3K."""
    found = advise(Lab("predicted").a100, Demand(3072, 10, 10))
    assert found.largest_batch == 1
    assert {checked.candidate.batch for checked in found.verified} == {1}
    assert "no decode has a chunk to piggyback on" in explain(found)[1]


def test_more_decodes_than_the_chunk_has_tokens(a6000: Machine) -> None:
    found = advise(a6000, Demand(64, 1, 1))
    assert found.largest_batch == 256
    balance = float(explain(found)[1].partition(" = ")[2].partition(",")[0])
    assert balance > 0
