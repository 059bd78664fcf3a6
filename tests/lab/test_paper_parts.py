"""The parts of the claims against hand-computed values and independent sums."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.lab.paper import gpt3, quantities
from sarathi_sim.experiments.lab.paper.claims import load_claims
from sarathi_sim.experiments.lab.paper.gpt3 import Assumptions, changed, relevant, run
from sarathi_sim.experiments.lab.paper.quantities import balanced, policy_of
from sarathi_sim.experiments.lab.paper.variants import Constants, Lab, calibrated, shipped
from sarathi_sim.experiments.run.machine import Machine
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Sequence
from sarathi_sim.profiler.facts.formats import TWO_BYTES
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, LAYER_OPS, OPS, ROW_OPS, GemmShape
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.op_times.iteration import WholeLayer

pytestmark = pytest.mark.lab

LAYERS = 40


def plain_ops(mixing_s: float = 0.0) -> Any:
    """Times one can compute by hand: 1 ms a layer, 2 us a row, 3 us a cached token of a decode."""
    model = load_model("llama-13b")
    by_rows = dict.fromkeys(ROW_OPS, lambda n: 0.0 * np.asarray(n))
    by_rows["preproj"] = lambda n: 1e-3 + 2e-6 * np.asarray(n)
    return SimpleNamespace(
        by_rows=by_rows,
        linear={op: by_rows[op] for op in LAYER_OPS},
        whole_layer=WholeLayer(both_s=mixing_s),
        all_reduce=None,
        reduces=OPS[ALL_REDUCE].calls,
        prefill=lambda chunk, context: 1e-9 * np.asarray(chunk) * (np.asarray(context) + 1),
        decode=lambda batch, context: 3e-9 * np.asarray(batch) * np.asarray(context),
        model=model,
        tp=1,
        numbers=TWO_BYTES,
        send={},
    )


def test_an_iteration_is_the_sum_of_its_ops() -> None:
    machine = Machine(plain_ops(mixing_s=1e-4), "a6000")
    mixed = machine.iteration([(100, 50)], decodes=4, context=1000)
    assert mixed.linear_s == pytest.approx(LAYERS * (1e-3 + 2e-6 * 104 + 1e-4))
    assert mixed.attention_s == pytest.approx(LAYERS * (1e-9 * 100 * 51 + 3e-9 * 4 * 1000))
    alone = machine.iteration(decodes=4, context=1000)
    assert alone.linear_s == pytest.approx(LAYERS * (1e-3 + 2e-6 * 4))  # nothing to mix


def test_a_machine_counts_whole_layers_as_the_predictor_does() -> None:
    """Every term, in an iteration of a chunk with decodes; contexts lie on the tables' grid."""
    terms = WholeLayer(scale=1.2, extra_s=3e-5, both=0.1, decode=0.3, both_s=2e-5)
    ops = replace(shipped("a6000", "llama-13b", 1), whole_layer=terms)
    machine = Machine(ops, "a6000")
    made = Batch(0, ((Sequence(0, 512, 1, 1), 256, 256),), 256, 4, 4 * 1024, 1024)
    layer_s, first_s, last_s, _ = machine.predictor(made)
    found = machine.iteration([(256, 256)], decodes=4, context=1024)
    assert found.total_s == pytest.approx(LAYERS * layer_s + first_s + last_s, rel=1e-6)
    parts = machine.iteration([(256, 256)]), machine.iteration(decodes=4, context=1024)
    assert found.attention_s == pytest.approx(sum(part.attention_s for part in parts))
    ops_s = sum(machine.block(260).values()) - 3e-5 + found.attention_s / LAYERS
    mixing = LAYERS * terms.mixing_s(ops_s, parts[1].attention_s / LAYERS)
    edges = float(machine.cost.first_s(260) + machine.cost.last_s(5))
    rows = machine.layers * sum(machine.block(260).values())
    assert found.linear_s == pytest.approx(rows + mixing + edges)


def test_quotients_of_iterations_by_hand() -> None:
    """40 layers of 1 ms and 2 us a row, 1 ns a query and key, 3 us a decode at context 1000."""
    machine = Machine(plain_ops(), "a6000")
    one, two = (LAYERS * (1e-3 + (2e-6 + 1e-9) * rows) for rows in (128, 256))
    assert quantities.iteration_growth(machine, 128, 256) == pytest.approx(100 * (two / one - 1))
    alone = LAYERS * (1e-3 + 4 * (2e-6 + 3e-9 * 1024)) / 4
    assert quantities.decode_token_ms(machine, 4) == pytest.approx(1e3 * alone)
    # Rows are as many; three pairs of query and key less, and three decodes' attention more.
    extra = LAYERS * (3 * 3e-9 * 1024 - 3 * 1e-9) / 3
    assert quantities.piggybacked_token_ms(machine, 1021, 3) == pytest.approx(1e3 * extra)
    assert quantities.piggybacked_decode_gain(machine, 4, 1021, 3) == pytest.approx(alone / extra)
    # (1 ms + 2 us B + 3 us B) / B over (2 us + 3 us), at context 1000 and B = 6.
    speedup = ((1e-3 + 6 * 5e-6) / 6) / 5e-6
    assert quantities.decode_speedup(machine, 6, 1000) == pytest.approx(speedup)
    parts = machine.prefill(600, chunk=256)  # 256, 256 and 88 tokens
    assert parts.linear_s == pytest.approx(LAYERS * (3 * 1e-3 + 2e-6 * 600))
    pairs = 256 * 1 + 256 * 257 + 88 * 513
    assert parts.attention_s == pytest.approx(LAYERS * 1e-9 * pairs)
    prefill = quantities.op_token_ms(machine, "preproj", "prefill", 2)
    assert prefill == pytest.approx(1e3 * LAYERS * (1e-3 + 2e-6 * 2048) / 2048)
    decode = quantities.op_token_ms(machine, "attention", "decode", 2)
    assert decode == pytest.approx(1e3 * LAYERS * 3e-9 * 1024)


def test_saturation_is_the_first_size_that_doubling_hardly_helps() -> None:
    rate = {1: 1.0, 2: 2.0, 4: 2.09, 8: 4.0}
    assert quantities.saturation(lambda n: rate[n], (1, 2, 4)) == 2
    assert quantities.saturation(float, (1, 2, 4)) == 8


@pytest.mark.parametrize(
    ("length", "batch", "stated", "chunks"),
    [(1024, 18, 14, 4), (1024, 6, 50, 4), (1024, 10, 28, 4), (2048, 5, 63, 8), (3072, 3, 127, 12)],
)
def test_the_papers_chunks_are_whole(length: int, batch: int, stated: int, chunks: int) -> None:
    """Each P:D at which the paper states a peak is the balanced one for chunk 256, rounded, and
    its prompt is a whole number of chunks of 256 - (B - 1) tokens, but for rounding."""
    assert balanced(256, batch) == pytest.approx(stated, abs=0.6)
    prompt, output = quantities.split(length, stated)
    assert prompt + output == length
    assert 0 <= chunks * (256 - (batch - 1)) - prompt <= 2


def test_the_baseline_serves_as_its_iterations_add_up() -> None:
    """B prompts together, then D - 1 iterations of B decodes; its rounds are alike."""
    machine = Lab("predicted").a6000
    batch, prompt, output = 6, 500, 12
    once, thrice = (
        machine.serve(policy_of("baseline"), batch, prompt, output, rounds) for rounds in (1, 3)
    )
    expected = machine.prefill(prompt, prompts=batch).total_s
    for step in range(output - 1):
        expected += machine.iteration(decodes=batch, context=prompt + step).total_s
    assert once.seconds == pytest.approx(expected, rel=2e-3)
    assert once.tokens == batch * (prompt + output)
    assert thrice.seconds == pytest.approx(3 * once.seconds)


@pytest.mark.parametrize("name", ["baseline", "orca_best", 256])
def test_seconds_by_op_add_up_to_the_run(name: quantities.Name) -> None:
    machine = Lab("paper-calibrated").a6000
    done = machine.serve(policy_of(name), 6, 500, 12, rounds=4)
    inside = sum(done.ops.values())
    assert inside < done.seconds < 1.02 * inside  # embedding and LM head come on top
    assert all(seconds >= 0 for seconds in done.ops.values())
    assert (done.ops["mixing"] > 0) == (name != "baseline")


def test_a_calibrated_gemm() -> None:
    """Its two limits, and a started tile that costs a whole one; without p all stays."""
    before = shipped("a6000", "llama-13b", 1)
    after = calibrated(before, Constants(read=1.5, compute=0.5, p=30.0, attn_decode=2.0))
    old, new = before.linear["ffn_ln1"], after.linear["ffn_ln1"]
    assert new(1) == pytest.approx(1.5 * old(1), rel=1e-6)  # memory-bound at such a p
    assert new(4096) == pytest.approx(0.5 * old(4096), rel=1e-6)
    assert new(1025) == pytest.approx(new(1152))
    assert new(1025) > new(1024)
    assert after.decode(4, 1000) == pytest.approx(2 * before.decode(4, 1000))
    assert after.prefill(64, 100) == before.prefill(64, 100)
    without_p = calibrated(before, Constants(read=3.0))
    assert without_p.linear["preproj"](300) == before.linear["preproj"](300), "as shipped"


def test_kept_tables_of_other_constants_are_not_mixed_up() -> None:
    """They are kept on disk by content."""
    before = shipped("a6000", "llama-13b", 1)
    sizes, contexts = np.arange(1.0, 4.0), np.array([1.0, 500.0])
    plain = before.decode.table(sizes, contexts)
    twice = calibrated(before, Constants(attn_decode=2.0)).decode.table(sizes, contexts)
    padded = changed(before, Assumptions(padded=True), 2048).decode.table(sizes, contexts)
    assert twice == pytest.approx(2 * plain)
    assert padded[:, 0] == pytest.approx(padded[:, 1])


def test_assumptions_change_op_times() -> None:
    ops = Lab("predicted").a6000.ops
    assert changed(ops, Assumptions(), 4096) is ops
    padded = changed(ops, Assumptions(padded=True), 2048)
    assert padded.decode(8, 100) == padded.decode(8, 2000) == ops.decode(8, 2048)
    scaled = changed(ops, Assumptions(factors=(("linear", 2.0), ("prefill", 3.0))), 2048)
    assert scaled.linear["preproj"](64) == pytest.approx(2 * ops.linear["preproj"](64))
    assert scaled.linear["others"](64) == pytest.approx(ops.linear["others"](64))
    assert scaled.prefill(64, 32) == pytest.approx(3 * ops.prefill(64, 32))
    assert scaled.decode(8, 100) == ops.decode(8, 100)


def test_runs_that_an_assumption_does_not_change_are_shared() -> None:
    pipeline_only = Assumptions(("engine.send=blocking", "batching.formation=lazy"))
    assert relevant(pipeline_only, gpt3.TP_ONLY) == Assumptions()
    assert relevant(pipeline_only, gpt3.ORCA) == pipeline_only
    both = Assumptions(("engine.jitter=0.05", "engine.send=blocking"), padded=True)
    assert relevant(both, gpt3.TP_ONLY) == Assumptions(("engine.jitter=0.05",), padded=True)
    chunk = Assumptions((f"scenarios.{gpt3.SARATHI}.policy.chunk_size=512",))
    assert relevant(chunk, gpt3.SARATHI) == chunk
    assert relevant(chunk, gpt3.ORCA) == relevant(chunk, gpt3.TP_ONLY) == Assumptions()


def test_without_a_pipeline_sends_and_formation_make_no_difference() -> None:
    machine, few = Lab("predicted").machine(*gpt3.GPT3), "workload.requests=200"
    plain, changed_too = (
        run(machine, gpt3.TP_ONLY, Assumptions((few, *settings))).end_s
        for settings in ((), ("engine.send=blocking", "batching.formation=lazy"))
    )
    assert plain == changed_too


def test_the_spread_holds_the_middle() -> None:
    middle, low, high = gpt3.spread(gpt3.Ratios(v, 1.0, 2.0, 3.0, 4.0) for v in (5.0, 0.1, 2.0))
    assert middle == (2.0, 1.0, 2.0, 3.0, 4.0)
    assert (low.orca_over_sarathi, high.orca_over_sarathi) == (0.1, 5.0)


def test_waiting_by_hand() -> None:
    """What is left of a request's time without its micro-batches' stages and links, one by one."""
    lab, few = Lab("predicted"), "workload.requests=60"
    records = run(lab.machine(*gpt3.GPT3), gpt3.SARATHI, Assumptions((few,)))
    log = records.replicas[0]
    times, rows = stage_times(log), log.iterations
    of_group = {g: np.flatnonzero(rows["group"] == g) for g in np.unique(rows["group"])}
    parts: dict[int, list[int]] = {}
    for request, _, group, first, last in log.spans.tolist():
        parts.setdefault(request, []).extend(of_group[group][first : last + 1].tolist())
    waits = []
    for _, own in sorted(parts.items()):
        served = (times.finish[own] - times.start[own]).sum() + 7 * rows["send_s"][own].sum()
        waits.append(rows["finish_s"][max(own)] - rows["ready_s"][min(own)] - served)
    assert gpt3.request_waits(records) == pytest.approx(waits, abs=1e-9)
    assert min(waits) >= -1e-9


def test_one_layer_and_intensity_by_hand() -> None:
    """An op's intensity at m rows is m n k / (m k + k n + m n); a decode's at 1024 is near 1."""
    shape = GemmShape(5120, 5120)
    assert quantities.gemm_intensity(shape, 1024) == pytest.approx(1024 * 5120 / (2 * 1024 + 5120))
    machine = Lab("predicted").a6000
    assert quantities.attention_intensity(machine, 1) == pytest.approx(1024 / 1025)
    usable, weights = 0.9 * machine.device.memory_bytes, 2 * 13.016e9
    assert quantities.batch_ratio(machine, 1024, layers=1) > machine.layers, (
        "the weights shrink, too"
    )
    a_request = 1024 * 40 * 2 * 2 * 5120
    assert quantities.fitting_batch(machine, 1024) == (usable - weights) // a_request


def test_claims_say_the_ratio_that_is_computed() -> None:
    """At the batch of their setting, of prompts in chunks of 256: a decode fewer than that fills
    an iteration."""
    pattern = re.compile(r"batch (\d+), P:D = (\d+)/(\d+)")
    found = [match for c in load_claims().values() if (match := pattern.search(c.setting))]
    assert len(found) == 6
    for batch, tokens, decodes in (map(int, match.groups()) for match in found):
        assert balanced(256, batch) == tokens / decodes
