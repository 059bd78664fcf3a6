"""Speculative decoding: what drafts give, what they cost, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.inputs import host_of
from sarathi_sim.experiments.config.loading import stored
from sarathi_sim.experiments.run.compare import explanation
from sarathi_sim.experiments.run.uncertainty import uncertainty
from sarathi_sim.experiments.sweeps.plan import run_key
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.log import DECODE
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Sequence
from sarathi_sim.profiler.facts.formats import Kernels, Stack
from sarathi_sim.profiler.facts.model import drafting_layer, load_model
from sarathi_sim.profiler.facts.ops import ALL_TO_ALL, MOE
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.simulator.load.acceptance import (
    AcceptanceError,
    DrawnAcceptance,
    golden_length,
    held_by_mean,
    held_by_position,
)
from sarathi_sim.simulator.op_times.iteration import IterationCost
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import ROOT, deployed, message

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
    "policy": {"name": "vllm", "async_scheduling": False},
    "scenarios": {"one": {}},
}
POLICIES = {
    "vllm": CONFIG["policy"],
    "vllm_async": {"name": "vllm", "async_scheduling": True},
    "sglang": {"name": "sglang"},
    "trtllm": {"name": "trtllm"},
}
PROFILES = ROOT / "data/profiles"
RANKS = {"max_length": 1024, "dp": 2, "expert_parallel": True, "moe_a2a_backend": "nccl"}
MTP = {"method": "mtp", "draft_length": 3, "acceptance": 2.4}
DRAFT = {**MTP, "method": "draft_model", "model": "llama-3.2-1b"}


def small(policy: str = "vllm", *assignments: str, **speculation: Any) -> Deployment:
    tree = CONFIG | {"policy": POLICIES[policy], "stack": POLICIES[policy]["name"]}
    tree |= {"speculation": speculation} if speculation else {}
    (found,) = deployed(tree, *assignments).values()
    return found


# What drafts give ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", [MTP, DRAFT])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_conserved(policy: str, method: dict[str, Any]) -> None:
    """Every decode yields its own token and the drafts that hold."""
    deployment = small(policy, **method)
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


@pytest.mark.parametrize("method", [MTP, DRAFT])
@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("held", [0, 1, 3])
def test_a_single_request_takes_one_decode_for_every_few_tokens(
    policy: str, held: int, method: dict[str, Any]
) -> None:
    """With so many drafts that always hold: ceil((D - 1) / L) decodes."""
    acceptance = [1.0] * held + [0.0] * (3 - held)
    one = ("workload.requests=1", "workload.lengths={kind: fixed, prompt: 100, decode: 90}")
    one += ("workload.pd_ratio=null",)
    records = small(policy, *one, **method | {"acceptance": acceptance}).simulate()
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
    assert golden_length("qwen3.5-397b-a17b", "mtp", "thinking_on", 3) == 3.39
    with pytest.raises(AcceptanceError, match=r"of mtp of deepseek-r1 .* give a number"):
        golden_length("deepseek-r1", "mtp", "thinking_on", 1)
    with pytest.raises(AcceptanceError, match="9 drafts"):
        golden_length("kimi-k2.5", "eagle3", "thinking_off", 9)
    (note,) = [note for note in small(**MTP).notes if note.startswith("speculation: ")]
    assert "draft length 3," in note and "length 2.40 tokens per decode (as configured)" in note


# What drafts cost ----------------------------------------------------------------------------


def verified(count: int, drafts: int, context: int) -> Batch:
    rows = tuple((Sequence(i, context, 1, 0), 1 + drafts, context) for i in range(count))
    held = count * context
    return Batch(0, (), 0, count, held, context, verified=rows, drafts=count * drafts)


@pytest.mark.parametrize(
    ("method", "many", "rows"), [(MTP, 1, 8 * 4), (DRAFT, 16, 8 * 5)], ids=["mtp", "draft_model"]
)
def test_the_time_of_verifying_and_of_drafting(
    method: dict[str, Any], many: int, rows: int
) -> None:
    """By hand: more rows in layer and head, one reading of the KV cache; then the drafter's pass
    over all rows (a draft model has one more of each sequence), and one more for each further
    draft; each with embedding, LM head, and all layers."""
    deployment = small(**method)
    predict, cost, layers = deployment.predictor, deployment.predictor.cost, 32
    drafter = predict.drafter
    assert drafter is not None and deployment.layers == (layers,)
    layer_s, first_s, last_s, _ = predict(verified(8, 3, 1024))
    rows_s = sum(cost.layer_parts(32).values())
    assert layer_s == pytest.approx(rows_s + cost.decode_s(8.0, 1024.0), rel=1e-6)
    assert first_s == pytest.approx(cost.first_s(32) + cost.host_s(8), rel=1e-6)
    own = cast(Any, drafter.of_each).__self__.cost
    passes = many * (sum(own.layer_parts(rows).values()) + own.decode_s(8.0, 1024.0))
    passes += 2 * many * (sum(own.layer_parts(8).values()) + own.decode_s(8.0, 1024.0))
    passes += own.first_s(rows) + 2 * own.first_s(8) + 3 * own.last_s(8)
    # (A layer's time is a whole number of quanta of 2^-30 s.)
    assert last_s == pytest.approx(cost.last_s(32) + passes, abs=3 * many * 2**-31 + 1e-9)
    # So many queries that their FLOPs take longer than reading the cache.
    longer = predict(verified(8, 255, 1024))[0] - sum(cost.layer_parts(2048).values())
    queries_s = 2048 * cost.query_s(1024.0)
    assert queries_s > cost.decode_s(8.0, 1024.0)
    assert longer == pytest.approx(queries_s, rel=1e-4)


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


def test_the_first_draft_after_a_prompt() -> None:
    """A prompt that ends is drafted for; one that does not only fills the drafter's KV."""
    drafter = small(**MTP).predictor.drafter
    assert drafter is not None
    sequence = Sequence(0, 512, 1, 0)
    chunk = ((sequence, 512, 0),)
    batch = Batch(0, chunk, 512, 0, 0, 0)
    (part,), (whole,) = drafter([batch]), drafter([replace(batch, yields=(sequence,))])
    assert part == sum(drafter.of_each([batch])[0][:2])
    assert whole > part
    own = small(**DRAFT).predictor.drafter
    assert own is not None
    longer = replace(batch, chunks=((sequence, 513, 0),), prefill_tokens=513)
    layer_s, embedding_s, *_ = own.of_each([longer])[0]
    assert own([batch]) == [16 * layer_s + embedding_s]


@pytest.mark.parametrize("name", ["qwen3.5-397b-a17b", "kimi-k2.5", "glm-5", "llama-3-8b"])
def test_drafters(name: str) -> None:
    """MTP: a layer of the model's kind; EAGLE-3: a dense one of its width; both of one layer."""
    model = load_model(name)
    mtp, eagle = drafting_layer(model, "mtp"), drafting_layer(model, "eagle3")
    assert mtp.num_layers == eagle.num_layers == 1
    assert mtp.experts is None or not mtp.experts.dense_layers
    assert mtp.share_of("attention") == eagle.share_of("attention") == 1
    assert eagle.experts is None and eagle.hidden_size == mtp.hidden_size == model.hidden_size
    last = sum(model.parameters_in(range(model.num_layers - 1, model.num_layers)))
    if model.recurrent is None:
        assert sum(mtp.parameters_in()) == last
    assert model.experts is None or sum(eagle.parameters_in()) < last


def test_a_drafter_is_cut_as_its_model_is() -> None:
    """EAGLE-3 has the model's own heads: 64 of gpt-oss-120b, of KV 8, which eight GPUs divide. Of
    latent attention it has 56, which sixteen GPUs do not divide, though they do the model's 128."""
    eagle = {"method": "eagle3", "draft_length": 3, "acceptance": 2.0}
    tree = CONFIG | {"speculation": eagle}
    model = {"model": "gpt-oss-120b", "moe_dtype": "w4a16_mxfp4"}
    (found,) = deployed({**tree, **model}, "cluster.tp=8").values()
    assert found.drafter is not None and found.drafter.model.heads_per_rank(8) == (8, 1)
    own = {"model": "deepseek-v3", "device": "h200-sxm", "dtype": "fp8_block"}
    said = message({**tree, **own}, "cluster.tp=16")
    assert said.startswith("--set cluster.tp: value 16: deepseek-v3-eagle3: tp 16")
    load_model("deepseek-v3").check_tp(16)


def config_json(folder: Path, name: str, **changes: Any) -> str:
    """The path of a Llama 3 8B that differs in some sizes, called ``name``."""
    path = folder / f"{name}.json"
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    path.write_text(json.dumps(llama | changes))
    return str(path)


@pytest.mark.parametrize("method", [MTP, DRAFT])
def test_the_drafter_is_a_part_of_its_own_in_an_explanation(method: dict[str, Any]) -> None:
    """The sum of its passes over the recorded decodes; without a drafter nothing."""
    one = ("workload.requests=1", "workload.lengths={kind: fixed, prompt: 100, decode: 91}")
    one += ("workload.pd_ratio=null",)
    deployment = small("sglang", *one, **method)
    analysis = Analysis(deployment.simulate())
    found = explanation(analysis, deployment.predictor)
    assert sum(found.stages.values()) == found.wall
    assert deployment.predictor.drafter is not None
    columns = analysis.records.replicas[0].iterations
    passes = 0.0
    for context, drafts in zip(columns["decode_context"], columns["drafts"], strict=True):
        if drafts:
            passes += deployment.predictor.drafter([verified(1, int(drafts), int(context))])[0]
    prompt = Batch(0, ((s := Sequence(0, 100, 1, 0), 100, 0),), 100, 0, 0, 0, yields=(s,))
    passes += deployment.predictor.drafter([prompt])[0]
    assert float(found.stages["drafter"]) == pytest.approx(passes, rel=1e-6)
    plain = small("sglang", *one)
    assert explanation(Analysis(plain.simulate()), plain.predictor).stages["drafter"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_draft_model_of_one_layer_of_the_models_kind_costs_what_mtp_costs(
    policy: str, tmp_path: Path
) -> None:
    """To the bit under SGLang and TensorRT-LLM, whose passes have the same rows. Under vLLM a draft
    model has a row more of each sequence in its first pass."""
    one = config_json(tmp_path, "one", num_hidden_layers=1)
    draft, mtp = small(policy, **DRAFT | {"model": one}), small(policy, **MTP)
    first, second = draft.predictor.drafter, mtp.predictor.drafter
    assert first is not None and second is not None
    assert first.slots == policy.startswith("vllm") and second.slots == 0
    same = replace(first, slots=0)
    for batch in (
        verified(8, 3, 1024),
        Batch(0, ((Sequence(0, 512, 1, 0), 512, 0),), 512, 0, 0, 0),
    ):
        assert same([batch]) == second([batch])
        assert (first([batch]) > second([batch])) == bool(first.slots)
    if not first.slots:
        before, after = (Analysis(one.simulate()).requests for one in (mtp, draft))
        assert before.equals(after)


def test_each_layer_of_a_draft_model_costs_time_and_memory(tmp_path: Path) -> None:
    ends, blocks, times = [], [], []
    for count in (1, 2, 8):
        name = config_json(tmp_path, f"of{count}", num_hidden_layers=count)
        found = small("vllm", "kv_cache.num_blocks=null", **DRAFT | {"model": name})
        ends.append(found.simulate().end_s)
        blocks.append(found.kv_capacity)
        assert found.predictor.drafter is not None
        times.append(found.predictor.drafter([verified(8, 3, 1024)])[0])
    assert ends[0] < ends[1] < ends[2] and blocks[0] > blocks[1] > blocks[2]
    # Embedding and LM head are the same; the layers are 1, 2 and 8 times one.
    assert times[2] - times[1] == pytest.approx(6 * (times[1] - times[0]), rel=1e-9)


def test_the_memory_of_a_draft_model() -> None:
    """By hand, of 16 tokens a block: keys and values of 32 layers of 8 heads of 128 numbers, and of
    16 layers of 8 heads of 64. All its weights, its tied embedding once, in its own format."""
    eight = small("vllm", "kv_cache.num_blocks=null")
    plain = ("vllm", "kv_cache.num_blocks=null")
    found, mtp = (small(*plain, **method).memory for method in (DRAFT, MTP))
    quantised = small(*plain, "dtype=fp8", **DRAFT).memory
    alone = small(*plain, "dtype=fp8").memory
    assert eight.memory and found and mtp and quantised and alone
    assert eight.memory.block_bytes == 16 * 2 * 2 * 32 * 8 * 128
    assert mtp.block_bytes == 16 * 2 * 2 * 33 * 8 * 128
    layer = sum(load_model("llama-3-8b").parameters_in(range(1)))
    assert mtp.weight_bytes - eight.memory.weight_bytes == pytest.approx(2 * layer)
    assert found.block_bytes == 16 * 2 * 2 * (32 * 8 * 128 + 16 * 8 * 64)
    for with_draft, without in ((found, eight.memory), (quantised, alone)):
        more = with_draft.weight_bytes - without.weight_bytes
        assert more == 2 * (1_235_814_400 - 2048)  # without the norm before the LM head


def test_a_draft_model_is_computed_in_the_formats_of_its_checkpoint() -> None:
    """Its KV cache is in that of the model: there is one for both."""
    tree = CONFIG | {"model": "qwen3-32b"}
    found = {}
    for name in ("qwen3-8b", "Qwen/Qwen3-8B-FP8"):
        for cache in ("bf16", "fp8"):
            more = {"speculation": DRAFT | {"model": name}, "kv_cache_dtype": cache, "dtype": "fp8"}
            (one,) = deployed(tree | more).values()
            assert one.drafter is not None and one.drafter.meta.kernels is not None
            used = one.drafter.meta.kernels.used
            found[name, cache] = used.dtype, used.kv_cache_dtype
    assert found == {
        ("qwen3-8b", "bf16"): ("bf16", "bf16"),
        ("qwen3-8b", "fp8"): ("bf16", "fp8"),
        ("Qwen/Qwen3-8B-FP8", "bf16"): ("fp8_block", "bf16"),
        ("Qwen/Qwen3-8B-FP8", "fp8"): ("fp8_block", "fp8"),
    }


def test_what_a_scheduler_knows_of_its_drafter() -> None:
    """As vLLM's configuration has it (``num_lookahead_tokens``,
    ``max_num_new_slots_for_drafting``); the other engines' schedulers know nothing of it."""
    ngram = {**MTP, "method": "ngram"}
    for method, lookahead, slots in ((MTP, 3, 0), (DRAFT, 3, 1), (ngram, 0, 0)):
        for policy, known in (("vllm", 1), ("sglang", 0), ("trtllm", 0)):
            (pool,) = cast(list[Pool], small(policy, **method).schedulers())
            assert (pool.draft_length, pool.lookahead) == (3, known * lookahead)
            assert pool.draft_slots == known * slots


def test_the_key_of_a_run_has_the_draft_model_in_it(tmp_path: Path) -> None:
    """Its content, not its name."""
    first, again, other = (
        small(**DRAFT | {"model": config_json(tmp_path, name, num_hidden_layers=layers)})
        for name, layers in (("a", 2), ("a", 2), ("b", 3))
    )
    assert run_key(first, "x") == run_key(again, "x") != run_key(other, "x")


# With pools, and with ranks -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm"])
def test_of_two_pools_the_decode_pool_speculates(policy: str) -> None:
    """Prefill as without drafts, and fewer decodes; a resolved scenario is the same again."""
    two = ("disaggregation={prefill: {}, decode: {cluster: {tp: 2}}}",)
    plain, drafts = small(policy, *two), small(policy, *two, **MTP)
    prefill, decode = drafts.pools
    assert (prefill.drafter, prefill.scenario.speculation) == (None, None)
    assert decode.drafter is not None and decode.scenario.speculation is not None
    assert any(note.startswith("decode speculation: mtp, draft length 3,") for note in drafts.notes)
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
    again = deployed({"name": "two", "scenarios": {"two": content}})["two"]
    assert Analysis(again.simulate()).requests.equals(after)


def ranks(speculation: dict[str, Any] = MTP) -> Deployment:
    """Two ranks of a mixture, which drafts with a layer like its own, or with a dense model."""
    tree = {**CONFIG, "model": "qwen3-30b-a3b", "cluster": RANKS, "speculation": speculation}
    (found,) = deployed(tree).values()
    return found


@pytest.mark.parametrize("method", [MTP, DRAFT | {"model": "qwen3-0.6b"}])
def test_ranks_with_drafts(method: dict[str, Any]) -> None:
    """Every rank's tokens are conserved; the ranks share the experts for all rows of a step."""
    deployment = ranks(method)
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
        passes += layer(batch)[1] + 2 * layer(one)[1]
        assert last_s == pytest.approx(model(batch)[2] + passes, abs=2e-8)
    assert whole == tuple(map(max, zip(*times, strict=True)))


# What is refused -----------------------------------------------------------------------------


def own(name: str) -> tuple[str, ...]:
    """Drafts of a model, or of one whose acceptance is golden."""
    if name == "golden":
        return (*own("llama-3.2-1b"), "speculation.acceptance=golden")
    return ("speculation.method=draft_model", f"speculation.model={name}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            ("policy={name: sarathi, chunk_size: 256}", "kv_cache=null"),
            "sarathi does not speculate",
        ),
        (("policy={name: sarathi_serve}",), "sarathi_serve does not speculate"),
        (("cluster.pp=2",), "needs cluster.pp 1"),
        (("policy={name: sglang, enable_mixed_chunk: true}",), "needs policy.enable_mixed_chunk: "),
        (("speculation.acceptance=golden",), "no acceptance of mtp of llama"),
        (("speculation.acceptance=4.5",), "must lie between 1 and 4"),
        (("speculation.acceptance=[0.5]",), "must be 3 probabilities"),
        (("speculation.method=medusa",), "drafters other than"),
        (("speculation.method=draft_model",), "speculation.model: is missing"),
        (("speculation.model=llama-3.2-1b",), "mtp has no model of its own"),
        (own("llama-3.2-1"), "speculation.model: unknown model 'llama-3.2-1'"),
        (own("qwen3-0.6b"), "vocabulary of llama-3-8b: 128256 tokens, not 15193"),
        (own("golden"), "speculation.acceptance: value 'golden': no acceptance"),
        (own("golden"), "(1 to 4), or 3 probabilities, as you measured them"),
        (
            ("policy.max_num_batched_tokens=1", "policy.max_num_seqs=1", *own("llama-3.2-1b")),
            "needs policy.max_num_batched_tokens of 2 or more",
        ),
        ((*own("llama-3.2-1b"), "cluster.tp=64"), "cluster.tp: value 64"),
        ((*own("llama-3.2-1b"), "cluster.pp=2"), "needs cluster.pp 1"),
        (
            ("disaggregation={prefill: {speculation: {method: ngram}}, decode: {}}",),
            "disaggregation.prefill.speculation: value 'ngram': must be left out",
        ),
    ],
)
def test_what_is_refused(changes: tuple[str, ...], says: str) -> None:
    assert says in message(CONFIG | {"speculation": MTP}, *changes)


def test_sglang_has_no_draft_model_beside_data_parallel_attention() -> None:
    tree = {**CONFIG, "model": "qwen3-30b-a3b", "cluster": RANKS, "policy": POLICIES["sglang"]}
    tree |= {"stack": "sglang", "speculation": DRAFT | {"model": "qwen3-0.6b"}}
    assert "needs cluster.dp 1" in message(tree)


def test_op_times_of_a_draft_model_come_from_where_the_models_do() -> None:
    """From a stack's tables, the calibrated device, or profiles, which must hold both models."""
    for stack, device in (("vllm", "h100-80g-sxm"), (None, "a100-80g-sxm")):
        found = small("vllm", f"stack={stack or 'null'}", f"device={device}", **DRAFT)
        assert found.drafter is not None and found.drafter.model.name == "llama-3.2-1b"
        assert (found.drafter.meta.kernels is None) == (stack is None)
    profiled = {"stack": None, "profiles": str(PROFILES), "device": str(PROFILES / "h200.yaml")}
    tree = CONFIG | profiled
    said = message({**tree, "speculation": DRAFT})
    assert "no profile bundle for device h200, model llama-3.2-1b, tp 1" in said
    assert "to measure one: sarathi-sim profile" in said
    said = message({**CONFIG, "speculation": DRAFT}, "device=a100-80g-sxm")
    assert "no prefill of vllm was measured" in said and "for the drafter, llama-3.2-1b" in said
    (both,) = deployed({**tree, "speculation": DRAFT | {"model": "llama-3-8b"}}).values()
    assert both.drafter is not None and both.drafter.bundle is not None


def test_a_draft_model_with_a_shorter_context_is_noted(tmp_path: Path) -> None:
    short = config_json(tmp_path, "short", num_hidden_layers=2, max_position_embeddings=512)
    found = small("vllm", **DRAFT | {"model": short})
    assert any("1024 is more than 512, the context of short" in note for note in found.notes)
