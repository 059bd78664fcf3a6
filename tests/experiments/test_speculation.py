"""Speculative decoding: what drafts give, what they cost, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.inputs import host_of
from sarathi_sim.experiments.config.loading import load_experiment, stored
from sarathi_sim.experiments.run.compare import explanation
from sarathi_sim.experiments.run.uncertainty import uncertainty
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.log import DECODE
from sarathi_sim.policies.request import Sequence
from sarathi_sim.profiler.facts.drafters import drafter_of
from sarathi_sim.profiler.facts.formats import Kernels, Stack
from sarathi_sim.profiler.facts.model import list_models, load_model
from sarathi_sim.profiler.facts.ops import ALL_TO_ALL, MOE
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.simulator.load.acceptance import (
    AcceptanceError,
    DrawnAcceptance,
    golden,
    golden_length,
    held_by_mean,
    held_by_position,
)
from sarathi_sim.simulator.op_times.iteration import IterationCost
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import deployed, message

CONFIG: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "model": "llama-3-8b",
    "device": "h100-80g-sxm",
    "stack": "vllm",
    "workload": {
        "requests": 24,
        "lengths": {"kind": "uniform", "min": 64, "max": 512},
        "pd_ratio": 1,
    },
    "cluster": {"max_length": 1024},
    "kv_cache": {"num_blocks": 2000, "prefix_caching": False},
}
POLICIES = {
    "vllm": {"name": "vllm"},
    "vllm_async": {"name": "vllm", "async_scheduling": True},
    "sglang": {"name": "sglang"},
    "trtllm": {"name": "trtllm"},
}
MTP = {"method": "mtp", "draft_length": 3, "acceptance": 2.4}


def small(policy: str = "vllm", *assignments: str, **speculation: Any) -> Deployment:
    tree = CONFIG | {"policy": POLICIES[policy], "stack": POLICIES[policy]["name"]}
    tree |= {"speculation": speculation} if speculation else {}
    (found,) = deployed(tree | {"scenarios": {"one": {}}}, *assignments).values()
    return found


# What drafts give ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_conserved(policy: str) -> None:
    """Every decode yields its own token and the drafts that hold."""
    deployment = small(policy, **MTP)
    records = deployment.simulate()
    table = Analysis(records).requests
    _, role, _, first, last = records.replicas[0].spans.T
    request = records.replicas[0].spans[:, 0]
    for one in table.to_dict("records"):
        own = (request == one["request"]) & (role == DECODE)
        decodes = (last - first + 1)[own].sum()
        assert one["output_tokens"] == 1 + decodes + one["accepted_tokens"]
        assert 0 <= one["accepted_tokens"] <= one["drafted_tokens"] <= 3 * decodes
    found = deployment.summary(Analysis(records))
    assert found["refused_tokens"] == (table["drafted_tokens"] - table["accepted_tokens"]).sum()
    # Its last decode may yield more than a request takes.
    assert found["accepted_per_step"] == pytest.approx(2.4, abs=0.1)


@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("held", [0, 1, 3])
def test_a_single_request_takes_one_decode_for_every_few_tokens(policy: str, held: int) -> None:
    """With so many drafts that always hold: ceil((D - 1) / L) decodes."""
    acceptance = [1.0] * held + [0.0] * (3 - held)
    one = ("workload.requests=1", "workload.lengths={kind: fixed, prompt: 100, decode: 90}")
    one += ("workload.pd_ratio=null",)
    records = small(policy, *one, **MTP | {"acceptance": acceptance}).simulate()
    decodes = records.replicas[0].iterations["decodes"]
    in_vain = records.replicas[0].iterations["decodes"].sum() - math.ceil(89 / (1 + held))
    assert in_vain == (policy != "vllm")  # the one formed ahead, before the end was known
    assert decodes.max() == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_of_which_none_holds_gain_nothing(policy: str) -> None:
    plain = small(policy).simulate()
    drafts = small(policy, **MTP | {"acceptance": 1.0}).simulate()
    assert drafts.end_s > plain.end_s
    looked_up = small(policy, method="ngram", draft_length=1, acceptance=1.0).simulate()
    assert plain.end_s <= looked_up.end_s <= drafts.end_s


def test_the_same_seed_draws_the_same_wherever_a_request_is_served() -> None:
    runs = [small("vllm", f"cluster.replicas={count}", **MTP).simulate() for count in (1, 1, 3)]
    tables = [Analysis(records).requests for records in runs]
    assert tables[0].equals(tables[1])
    accepted = [table["accepted_tokens"] for table in tables]
    assert accepted[0].equals(accepted[2])
    drawn, other = (DrawnAcceptance(held_by_mean(2.4, 3), seed) for seed in (7, 8))
    assert [drawn(5, at, 3) for at in range(200)] != [other(5, at, 3) for at in range(200)]
    assert [drawn(5, at, 3) for at in range(6)] == [2, 0, 1, 0, 0, 1], "in any process"


def test_the_draw_has_the_stated_probabilities() -> None:
    """Of each position, given those before; and the stated mean."""
    drawn = DrawnAcceptance(held_by_position([0.8, 0.6, 0.45]), 1)
    held = np.array([drawn(id, known, 3) for id in range(200) for known in range(200)])
    for position, expected in enumerate([0.8, 0.48, 0.216], 1):
        assert (held >= position).mean() == pytest.approx(expected, abs=0.01)
    assert drawn.mean == pytest.approx(1 + held.mean(), abs=0.02)
    assert (np.minimum(held, 1) == [drawn(i, k, 1) for i in range(200) for k in range(200)]).all()
    for mean in (1.0, 1.7, 2.4, 4.0):
        assert DrawnAcceptance(held_by_mean(mean, 3), 0).mean == pytest.approx(mean)
    with pytest.raises(ValueError, match="between 1 and 4"):
        held_by_mean(4.5, 3)


def test_published_acceptance() -> None:
    """Of each model there are eight means, each at least that of one draft; the note names it."""
    for by_method in golden().golden.values():
        for by_thinking in by_method.values():
            for means in by_thinking.values():
                assert len(means) == 8 and min(means) == means[0]
                assert all(1 <= mean <= length + 2 for length, mean in enumerate(means))
    assert golden_length("qwen3.5-397b-a17b", "mtp", "thinking_on", 3) == 3.39
    with pytest.raises(AcceptanceError, match=r"of mtp of deepseek-r1 .* give a number"):
        golden_length("deepseek-r1", "mtp", "thinking_on", 1)
    with pytest.raises(AcceptanceError, match="9 drafts"):
        golden_length("kimi-k2.5", "eagle3", "thinking_off", 9)
    (note,) = [note for note in small(**MTP).notes if note.startswith("speculation: ")]
    assert "3 drafts a decode" in note and "yields 2.40 tokens (as configured)" in note


# What drafts cost ----------------------------------------------------------------------------


def verified(count: int, drafts: int, context: int) -> Batch:
    """Decodes with drafts."""
    rows = tuple((Sequence(i, context, 1, 0), 1 + drafts, context) for i in range(count))
    held = count * context
    return Batch(0, (), 0, count, held, context, verified=rows, drafts=count * drafts)


def test_the_time_of_verifying_and_of_drafting() -> None:
    """By hand: more rows in layer and head, one reading of the KV cache; then the drafter's pass
    over all rows, and one more for each further draft."""
    deployment = small(**MTP)
    predict, cost, layers = deployment.predictor, deployment.predictor.cost, 32
    drafter = predict.drafter
    assert drafter is not None and deployment.layers == (layers,)
    layer_s, first_s, last_s, _ = predict(verified(8, 3, 1024))
    rows_s = sum(cost.layer_parts(32).values())
    assert layer_s == pytest.approx(rows_s + cost.decode_s(8.0, 1024.0), rel=1e-6)
    assert first_s == pytest.approx(cost.first_s(32) + cost.host_s(8), rel=1e-6)
    own = cast(Any, drafter.of_each).__self__.cost
    passes = sum(own.layer_parts(32).values()) + own.decode_s(8.0, 1024.0)
    passes += 2 * (sum(own.layer_parts(8).values()) + own.decode_s(8.0, 1024.0))
    assert last_s == pytest.approx(cost.last_s(32) + passes + 3 * own.last_s(8), rel=1e-6)
    # So many queries that their FLOPs take longer than reading the cache.
    many = predict(verified(8, 255, 1024))[0] - sum(cost.layer_parts(2048).values())
    queries_s = 2048 * cost.query_s(1024.0)
    assert queries_s > cost.decode_s(8.0, 1024.0)
    assert many == pytest.approx(queries_s, rel=1e-4)


@pytest.mark.parametrize("device", ["h200-sxm", "b200-sxm"])
@pytest.mark.parametrize("stack", ["sglang", "trtllm", "vllm"])
def test_a_query_of_latent_attention_multiplies_compressed_keys(device: str, stack: Stack) -> None:
    """It takes at least its FLOPs at the data sheet's rate: 128 heads, 576 numbers a key and 512 a
    value; and no longer than one of many decodes, so drafts cost at most as many decodes."""
    contexts = np.array([512.0, 2048.0, 8192.0, 32768.0])
    for tp, dp in ((1, 8), (1, 1), (8, 1)):
        kernels = Kernels(stack, "fp8_block", "fp8", expert_parallel=True, dp=dp)
        times = StackTimes(device, kernels, load_model("deepseek-r1"), tp)
        cost = IterationCost(modelled_times(times))
        least = 2 * 128 / tp * (576 + 512) * contexts / (2 * times.device.peak_flops)
        found = cost.query_s(contexts)
        assert (found > least).all() and (np.diff(found) > 0).all()
        assert (found <= cost.decode_s(128, contexts) / 128).all()


def test_a_query_of_latent_attention_takes_no_projection_nor_the_wide_form_twice() -> None:
    """SGLang's own prompts on Hopper multiply compressed keys already: as long as its ranks', whose
    prompts are TensorRT-LLM's times 3.4. Cached tokens are not projected again."""
    held = np.array([2048.0, 8192.0])
    found: dict[tuple[Stack, int], Any] = {("sglang", 1): None, ("sglang", 8): None}
    found |= {("trtllm", 1): None, ("vllm", 1): None}
    for stack, dp in found:
        kernels = Kernels(stack, "fp8_block", "bf16", expert_parallel=True, dp=dp)
        times = StackTimes("h200-sxm", kernels, load_model("deepseek-r1"), 1)
        assert times.wider == (1.0 if (stack, dp) == ("sglang", 1) else (576 + 512) / (192 + 128))
        found[stack, dp] = IterationCost(modelled_times(times)).query_s(held)
        alone = times.wider * times.prefill(2 * held, np.zeros(2)) / (2 * held)
        decodes = times.decode(np.full(2, 128.0), held) / 128
        assert found[stack, dp] == pytest.approx(1e-6 * np.minimum(alone, decodes))
    assert found["sglang", 1] == pytest.approx(found["sglang", 8], rel=0.1)
    sparse = StackTimes("h200-sxm", Kernels("vllm", "fp8_block", "bf16"), load_model("glm-5"), 8)
    assert sparse.wider == 1


def test_the_first_draft_after_a_prompt() -> None:
    """A prompt that ends is drafted for; one that does not only fills the drafter's KV."""
    drafter = small(**MTP).predictor.drafter
    assert drafter is not None
    sequence = Sequence(0, 512, 1, 0)
    chunk = ((sequence, 512, 0),)
    batch = Batch(0, chunk, 512, 0, 0, 0)
    (part,), (whole,) = drafter([batch]), drafter([replace(batch, yields=(sequence,))])
    assert part == drafter.of_each([batch])[0][0]
    assert whole > part


@pytest.mark.parametrize("name", ["qwen3.5-397b-a17b", "kimi-k2.5", "glm-5", "llama-3-8b"])
def test_drafters(name: str) -> None:
    """MTP: a layer of the model's kind; EAGLE-3: a dense one of its width; both of one layer."""
    model = load_model(name)
    mtp, eagle = drafter_of(model, "mtp"), drafter_of(model, "eagle3")
    assert mtp is not None and eagle is not None and drafter_of(model, "ngram") is None
    assert mtp.num_layers == eagle.num_layers == 1
    assert mtp.experts is None or not mtp.experts.dense_layers
    assert mtp.share_of("attention") == eagle.share_of("attention") == 1
    assert eagle.experts is None and eagle.hidden_size == mtp.hidden_size == model.hidden_size
    last = sum(model.parameters_in(range(model.num_layers - 1, model.num_layers)))
    if model.recurrent is None:
        assert sum(mtp.parameters_in()) == last
    assert model.experts is None or sum(eagle.parameters_in()) < last


def test_every_model_has_drafters() -> None:
    for name in list_models():
        for method in ("mtp", "eagle3"):
            assert drafter_of(load_model(name), method) is not None


def test_a_drafter_is_cut_as_its_model_is() -> None:
    """EAGLE-3 has the model's own heads: 64 of gpt-oss-120b, of KV 8, which eight GPUs divide. Of
    latent attention it has 56, which sixteen GPUs do not divide, though they do the model's 128."""
    eagle = {"method": "eagle3", "draft_length": 3, "acceptance": 2.0}
    tree = CONFIG | {"policy": POLICIES["vllm"], "speculation": eagle, "scenarios": {"one": {}}}
    model = {"model": "gpt-oss-120b", "moe_dtype": "w4a16_mxfp4"}
    (found,) = deployed({**tree, **model}, "cluster.tp=8").values()
    assert found.drafter is not None and found.drafter.model.heads_per_rank(8) == (8, 1)
    own = {"model": "deepseek-v3", "device": "h200-sxm", "dtype": "fp8_block"}
    said = message({**tree, **own}, "cluster.tp=16")
    assert said.startswith("--set cluster.tp: value 16: deepseek-v3-eagle3: tp 16")
    load_model("deepseek-v3").check_tp(16)


def test_the_memory_of_a_drafter() -> None:
    """Its weights, and a layer more of keys and values: a block is 33/32 as large."""
    sizes = []
    for method in ("ngram", "mtp"):
        deployment = small("vllm", "kv_cache.num_blocks=null", **MTP | {"method": method})
        assert deployment.memory is not None
        sizes.append((deployment.memory.block_bytes, deployment.memory.weight_bytes))
    (plain, weights), (block, more) = sizes
    assert block == pytest.approx(33 / 32 * plain)
    assert more - weights == pytest.approx(
        sum(load_model("llama-3-8b").parameters_in(range(1))) * 2
    )


# With pools, and with ranks -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm"])
def test_of_two_pools_the_decode_pool_speculates(policy: str) -> None:
    """Prefill as without drafts, and fewer decodes; a resolved scenario is the same again."""
    two = ("disaggregation={prefill: {}, decode: {cluster: {tp: 2}}}",)
    plain, drafts = small(policy, *two), small(policy, *two, **MTP)
    prefill, decode = drafts.pools
    assert (prefill.drafter, prefill.scenario.speculation) == (None, None)
    assert decode.drafter is not None and decode.scenario.speculation is not None
    assert any(note.startswith("decode speculation: mtp, 3 drafts") for note in drafts.notes)
    records = drafts.simulate()
    before, after = (Analysis(one).requests for one in (plain.simulate(), records))
    assert after["finish_s"].max() < before["finish_s"].max()
    first, second = records.replicas
    assert not first.iterations["drafts"].any() and second.iterations["drafts"].any()
    known = policy != "vllm"  # (else the decode worker yields the first token)
    _, role, _, start, last = second.spans.T
    for one in after.to_dict("records"):
        own = (second.spans[:, 0] == one["request"]) & (role == DECODE)
        decodes = (last - start + 1)[own].sum()
        assert one["output_tokens"] == 1 + decodes + one["accepted_tokens"]
        assert (role[second.spans[:, 0] == one["request"]] != DECODE).any() == (not known)
    summary = drafts.summary(Analysis(records))
    assert summary["accepted_per_step"] == pytest.approx(2.4, abs=0.1)
    content, _ = stored(drafts.scenario, "two")
    experiment = load_experiment({"name": "two", "scenarios": {"two": content}})
    again = deploy(experiment.scenarios["two"], experiment.sources["two"])
    assert Analysis(again.simulate()).requests.equals(after)


def ranks() -> Deployment:
    """Two ranks of a mixture, which drafts with a layer like its own."""
    cluster = {"max_length": 1024, "dp": 2, "expert_parallel": True, "moe_a2a_backend": "nccl"}
    tree = {**CONFIG, "model": "qwen3-30b-a3b", "cluster": cluster, "policy": POLICIES["vllm"]}
    (found,) = deployed({**tree, "speculation": MTP, "scenarios": {"one": {}}}).values()
    return found


def test_ranks_with_drafts() -> None:
    """Every rank's tokens are conserved; the ranks share the experts for all rows of a step."""
    deployment = ranks()
    records = deployment.simulate()
    assert records.ranks == (2,) and len(records.replicas) == 2
    analysis = Analysis(records)
    for number, log in enumerate(records.replicas):
        mine = analysis.requests[analysis.requests["replica"] == number]
        _, role, _, first, last = log.spans.T
        decodes = (last - first + 1)[role == DECODE].sum()
        accepted = mine["accepted_tokens"].sum()
        assert accepted and mine["output_tokens"].sum() == len(mine) + decodes + accepted
        columns = log.iterations
        rows = columns["prefill_tokens"] + columns["decodes"] + columns["drafts"]
        assert (rows <= columns["most_tokens"]).all()
        assert (columns["most_tokens"] <= columns["all_tokens"]).all()
        assert (columns["all_tokens"] <= rows + columns["most_tokens"]).all()
    assert deployment.summary(analysis)["accepted_per_step"] == pytest.approx(2.4, abs=0.1)
    explained = explanation(analysis, deployment.predictor)
    assert sum(explained.stages.values()) == explained.wall
    band = uncertainty(deployment, analysis)
    assert band is not None and np.isfinite(band.slower).all()


def test_the_time_of_ranks_with_drafts() -> None:
    """By hand: a rank's own rows, beside experts at those of all and an exchange at those of the
    first; so in each pass of the drafter, whose further ones have a row a sequence."""
    deployment = ranks()
    assert deployment.drafter is not None
    host = replace(host_of(deployment.scenario.engine), launch_layer_s=0.0)
    model, drafter = deployment._predictor(deployment.ops, host), deployment.drafter
    layer = deployment._predictor(drafter)
    step = [verified(8, 3, 512), verified(2, 3, 256)]
    further = [Batch(0, (), 0, 8, 8 * 512, 512), Batch(0, (), 0, 2, 2 * 256, 256)]

    def met(predict: BundlePredictor, batch: Batch, rows: int, most: int) -> float:
        """A layer's time, met by the other rank."""
        op_s, own = predict.cost.op_s, batch.num_tokens
        beside = predict(batch)[0] - op_s(MOE, own) - op_s(ALL_TO_ALL, own)
        return float(beside + op_s(MOE, rows) + op_s(ALL_TO_ALL, most))

    times, whole = deployment.step_predictor(step)
    for batch, one, (layer_s, first_s, last_s, _) in zip(step, further, times, strict=True):
        assert layer_s == pytest.approx(met(model, batch, 40, 32), abs=5e-9)
        assert first_s == pytest.approx(model(batch)[1])
        passes = met(layer, batch, 40, 32) + 2 * met(layer, one, 10, 8) + 3 * layer(one)[2]
        assert last_s == pytest.approx(model(batch)[2] + passes, abs=2e-8)
    assert whole == tuple(map(max, zip(*times, strict=True)))


# What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changes", "says"),
    [
        ({"name": "sarathi", "chunk_size": 256}, ("kv_cache=null",), "sarathi verifies no drafts"),
        ({"name": "sarathi_serve"}, (), "sarathi_serve verifies no drafts"),
        (POLICIES["vllm"], ("cluster.pp=2",), "needs cluster.pp 1"),
        (
            {"name": "sglang", "enable_mixed_chunk": True},
            (),
            "needs policy.enable_mixed_chunk: false",
        ),
        (POLICIES["vllm"], ("speculation.acceptance=golden",), "no acceptance of mtp of llama"),
        (POLICIES["vllm"], ("speculation.acceptance=4.5",), "must lie between 1 and 4"),
        (POLICIES["vllm"], ("speculation.acceptance=[0.5]",), "must be 3 probabilities"),
        (POLICIES["vllm"], ("speculation.method=draft_model",), "drafters other than"),
        (
            POLICIES["vllm"],
            ("disaggregation={prefill: {speculation: {method: ngram}}, decode: {}}",),
            "disaggregation.prefill.speculation: value 'ngram': must be left out",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(policy: dict[str, Any], changes: tuple[str, ...], says: str) -> None:
    tree = CONFIG | {"policy": policy, "speculation": MTP, "scenarios": {"one": {}}}
    assert says in message(tree, *changes)
