"""A key that cannot act is refused by name; in a space it must act at one point."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_sim.experiments.capacity.answer import read_question
from sarathi_sim.experiments.capacity.sensitivity import read_sensitivity
from sarathi_sim.experiments.sweeps.plan import plan_sweep
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import deployed, message

ONE: dict[str, Any] = {
    **{"name": "one", "model": "llama-3-8b", "device": "a100-80g-sxm", "policy": {"name": "vllm"}},
    "workload": {
        "requests": 20,
        "lengths": {"kind": "fixed", "prompt": 100, "decode": 9},
        "arrivals": {"kind": "poisson", "rate": 2},
    },
    "cluster": {"max_length": 1024},
}
USERS = "requests of several users (a trace's column user)"
GPUS = "cluster.tp or cluster.pp above 1"
FLIGHT = "several micro-batches in flight"
COUNTS = "an engine that counts them"
OPS = "one of the ops preproj, "
ONE_BY_ONE = "requests that arrive one after the other"


def policy(keys: str) -> str:
    return f"policy={{name: {keys}}}"


MICRO, SGLANG, TRTLLM = map(policy, ("sarathi, chunk_size: 256", "sglang", "trtllm"))
WHOLE_PROMPTS, FAIR = policy("sglang, chunked_prefill_size: null"), policy("fair")


STACK = f"stack=sglang; {SGLANG}; device=h100-80g-sxm"
PP, DYNAMIC = "cluster.pp=2", "policy.enable_dynamic_chunking_schedule=true"
AT_ONCE = "workload.arrivals={kind: at_once}"
POISSON = "workload.arrivals={kind: poisson, rate: 1}"


@pytest.mark.parametrize(
    ("key", "need", "given", "beside"),
    [
        ("cluster.router=random", "cluster.replicas above 1", "", "cluster.replicas=2"),
        ("cluster.gpus_per_node=4", GPUS, "", "cluster.tp=2"),
        ("cluster.intra_node={bandwidth: 1e11}", GPUS, "", "cluster.tp=2"),
        ("cluster.inter_node={bandwidth: 1e10}", "a replica on several ", "cluster.tp=8", PP),
        ("batching.formation=lazy", FLIGHT, MICRO, PP),
        ("batching.micro_batches=free", FLIGHT, MICRO, PP),
        ("kv_cache.activation_bytes=1e9", COUNTS, SGLANG, TRTLLM),
        ("kv_cache.cuda_graph_bytes=1e9", COUNTS, SGLANG, policy("vllm")),
        ("engine.send=blocking", "cluster.pp above 1", "cluster.tp=2", PP),
        ("engine.layer_time=sum", "a profile that holds whole layers", "", ""),
        ("engine.cudagraph_mode=FULL_DECODE_ONLY", "stack: vllm", STACK, "stack=vllm"),
        ("engine.op_scale.all_reduce=2", OPS, "", "cluster.tp=2"),
        ("engine.op_scale.send_recv=2", OPS, "", PP),
        ("engine.op_scale.moe=2", OPS, "", ""),
        ("workload.shift.burstiness=2", ONE_BY_ONE, AT_ONCE, POISSON),
        ("policy.adaptive_threshold=true", "", "", "policy.long_prefill_token_threshold=64"),
        ("policy.scheduling_policy=priority", "requests of several priorities", "", ""),
        ("policy.input_weight=3", USERS, FAIR, ""),
        ("policy.enable_mixed_chunk=true", "", WHOLE_PROMPTS, "policy.chunked_prefill_size=64"),
        ("policy.chunk_schedule_stages=4", "", policy("sarathi_serve"), DYNAMIC),
        ("policy.batch_wait_timeout_iters=4", "", TRTLLM, "policy.batch_wait_max_tokens_ratio=0.5"),
        ("policy.enable_balance=true", "cluster.dp above 1", TRTLLM, ""),
        ("policy.timeout_iters=4", "policy.enable_balance", TRTLLM, ""),
    ],
)
def test_a_key_acts_or_is_refused(key: str, need: str, given: str, beside: str) -> None:
    """Refused without what it needs: by default the key of what makes it act beside it."""
    where, before = key.partition("=")[0], [each for each in given.split("; ") if each]
    changes = [*before, key]
    said = message(ONE, *changes)
    need = f"has no effect here: needs {need or beside.partition('=')[0]}"
    assert said.startswith(f"--set {where}: value ") and need in said
    if beside:
        at = 1 if beside.startswith("policy={") else len(changes)
        deployed(ONE, *changes[:at], beside, *changes[at:])
    deployed(ONE, *before)


def test_it_must_act_in_one_of_the_scenarios_that_it_is_for() -> None:
    """Above two scenarios it may act in one; in its own scenario it must act there."""
    above = ONE | {"engine": {"send": "blocking"}}
    both: dict[str, Any] = {"one": {}, "two": {"cluster": {"pp": 2}}}
    deployed(above | {"scenarios": both})
    assert "configuration: engine.send: value 'blocking'" in message(above)
    own = {"one": {"engine": {"send": "blocking"}}, "two": {"cluster": {"pp": 2}}}
    said = message(ONE | {"scenarios": own})
    assert said.startswith("configuration: scenarios.one.engine.send: value 'blocking': has no")
    every = {name: {**keys, "seed": 1} for name, keys in both.items()}
    said = message(ONE | {"seed": 3, "scenarios": every})
    why = "has no effect, because every scenario sets this itself"
    assert said == f"configuration: seed: {why}; change one with --set scenarios.one.seed=..."


def test_it_must_act_at_one_point_of_a_space() -> None:
    tree = ONE | {"engine": {"send": "blocking"}}
    slo = {"slo": "p90 ttft 1s"}
    wrong = r"engine\.send: value 'blocking': has no effect"
    grids = [{"grid": {"cluster.pp": stages}} for stages in ([1, 2], [1])]
    spaces = [tree | {"capacity": slo | {"space": grid}} for grid in grids]
    assert len(plan_sweep(tree | {"sweep": grids[0]}).runs) == 2
    assert len(read_question(spaces[0], [])[2]) == 2
    assert len(read_sensitivity(spaces[0]).options) == 2
    with pytest.raises(UserError, match=wrong):
        plan_sweep(tree | {"sweep": grids[1]})
    with pytest.raises(UserError, match=wrong):
        read_question(spaces[1], [])
    with pytest.raises(UserError, match=wrong):
        read_sensitivity(tree, metrics=["ttft_s.p99"])
    with pytest.raises(UserError, match=wrong):
        plan_sweep(ONE | {"sweep": {"grid": {"engine.send": ["overlapped", "blocking"]}}})


def test_in_two_pools_it_must_act_in_one_of_them() -> None:
    pools = {"prefill": {"cluster": {"pp": 2}}, "decode": {}}
    tree = ONE | {"disaggregation": pools, "engine": {"send": "blocking"}}
    deployed(tree)
    alone = ONE | {"disaggregation": {**pools, "decode": {"engine": {"send": "blocking"}}}}
    said = message(alone)
    assert said.startswith("configuration: disaggregation.decode.engine.send: value 'blocking'")
    said = message(ONE | {"disaggregation": {**pools, "frontends": 2}})
    assert "disaggregation.frontends: value 2: has no effect here: needs several workers" in said
