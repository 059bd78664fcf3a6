"""Facts of engines by version."""

from __future__ import annotations

import pytest

from sarathi_sim.experiments.config.inputs import version_defaults
from sarathi_sim.profiler.facts.device import (
    Fact,
    capability,
    engine_facts,
    load_device,
    memory_class,
)
from sarathi_sim.profiler.facts.formats import STACKS
from tests.experiments.small_config import deployed, message

ONE = """
name: one
model: llama-3-8b
device: a100-80g-sxm
workload: {requests: 4, lengths: {kind: fixed, prompt: 64, decode: 8}}
cluster: {max_length: 256}
policy: {name: vllm}
"""


def test_every_row_has_a_source_and_the_last_one_holds_for_the_newest() -> None:
    for name in STACKS:
        for key, rows in engine_facts(name).facts.items():
            assert all(row.source for row in rows)
            assert rows[-1].holds("999", {}) and not rows[-1].when, (name, key)


def test_a_row_holds_from_since_on_and_before_until() -> None:
    row = Fact(1, "x", since="0.9", until="0.10.1", when={"memory": "large"})
    about = {"memory": "large"}
    held = [v for v in ("0.8.9", "0.9", "0.10", "0.10.1", "0.10.1.1") if row.holds(v, about)]
    assert held == ["0.9", "0.10"] and not row.holds("0.9", {})
    with pytest.raises(KeyError, match="unheard"):
        engine_facts("vllm").at("unheard")


@pytest.mark.parametrize(
    ("version", "logit", "gib", "ahead"),
    [
        ("0.8.3", 38, 1.97, False),
        ("0.10.1.1", 38, 0.1, False),
        ("0.15.1", 38, 0.42, True),
        ("0.17.0", 15, 0.42, True),
        ("0.19.1rc1.dev316", 15, 1.84, True),
        ("", 15, 1.84, True),
    ],
)
def test_vllms_facts(version: str, logit: int, gib: float, ahead: bool) -> None:
    facts = engine_facts("vllm")
    assert facts.at("logit_bytes", version) == logit
    assert facts.at("logit_bytes", version, sampler="flashinfer") == 15
    assert facts.at("collectives_gib", version) == gib
    assert facts.at("async_scheduling", version) == ahead


def test_limits_by_the_class_of_a_gpu() -> None:
    names = ("a100-80g-sxm", "l40s", "h100-80g-sxm", "h200-sxm", "b200-sxm")
    classes = [memory_class(load_device(name)) for name in names]
    assert classes == ["small", "small", "large", "large", "huge"]
    facts = engine_facts("vllm")
    budgets = [facts.at("max_num_batched_tokens", "0.27", memory=one) for one in classes]
    assert budgets == [2048, 2048, 8192, 8192, 8192]
    assert facts.at("max_num_batched_tokens", "0.28", memory="huge") == 16384


@pytest.mark.parametrize(
    ("assignments", "ahead", "told"),
    [
        ((), True, ""),
        (("policy.version=0.32.0",), True, ""),
        (("policy.version=0.13.0",), False, "vllm 0.13.0: simulated as 0.32"),
        (
            ('policy.version="0.35"',),
            True,
            "vllm 0.35: simulated as 0.33, the nearest version",
        ),
        (("policy.version=0.13.0", "policy.async_scheduling=true"), True, "simulated as 0.32"),
        (("cluster.pp=2",), False, ""),
        (("speculation={method: ngram, draft_length: 2, acceptance: 1.2}",), False, ""),
    ],
)
def test_defaults_of_a_version(assignments: tuple[str, ...], ahead: bool, told: str) -> None:
    (found,) = deployed(ONE, *assignments).values()
    assert found.scenario.policy.described()["async_scheduling"] == ahead
    assert found.scenario.batching.max_in_flight == found.scenario.cluster.pp + ahead
    notes = [note for note in found.notes if "simulated as" in note]
    assert len(notes) == bool(told) and all(told in note for note in notes)
    (again,) = deployed(ONE, "policy.async_scheduling=false").values()
    assert version_defaults(again.scenario, again.device)["policy"] == {"async_scheduling": True}


def test_the_share_of_the_memory_is_the_versions() -> None:
    """vLLM takes 0.92 of it from 0.20 on, and 0.9 before; what is given counts before both."""
    for version, given, share in (
        ("0.33", (), 0.92),
        ("0.19", (), 0.9),
        ("0.33", ("cluster.usable_memory=0.8",), 0.8),
        ("0.33", ("kv_cache={gpu_memory_utilization: 0.7}", "cluster.usable_memory=0.8"), 0.7),
    ):
        (found,) = deployed(ONE, f"policy.version='{version}'", *given).values()
        assert found.memory is not None and found.memory.share == share


def test_a_version_is_no_number() -> None:
    assert 'value 0.3: must be in quotes, as in "0.33"' in message(ONE, "policy.version=0.30")
    assert "must begin with a number, as in 0.33" in message(ONE, "policy.version=nightly")


@pytest.mark.parametrize(
    ("version", "device", "cluster", "largest"),
    [
        ("0.16", "h100-80g-sxm", "tp: 2", 0),
        ("0.17", "h100-80g-sxm", "tp: 2", 64),
        ("0.33", "h100-80g-sxm", "tp: 8", 0.5),
        ("0.17", "b200-sxm", "tp: 4", 32),
        ("0.18", "b300-sxm", "tp: 4", 0),
        ("0.19", "b300-sxm", "tp: 4", 64),
        ("0.18", "b200-sxm", "tp: 2, pp: 2", 0),
        ("0.33", "b200-sxm", "tp: 2, pp: 2", 64),
        ("0.33", "h100-80g-sxm", "tp: 1", 0),
        ("0.33", "h100-80g-sxm", "tp: 8, gpus_per_node: 4", 0),
        ("0.33", "h100-80g-sxm", "tp: 2, intra_node: {kind: pcie}", 0),
        ("0.33", "a100-80g-sxm", "tp: 2", 0),
    ],
)
def test_fused_all_reduces(version: str, device: str, cluster: str, largest: float) -> None:
    """vllm/config/vllm.py and its table of sizes, by release, capability and GPUs."""
    changes = f"cluster={{max_length: 256, {cluster}}}", f"policy.version='{version}'"
    (found,) = deployed(ONE, "stack=vllm", f"device={device}", *changes).values()
    assert found.scenario.engine.fi_allreduce_fusion_max_size_mb == largest
    given = "engine.fi_allreduce_fusion_max_size_mb=3"
    (own,) = deployed(ONE, "stack=vllm", f"device={device}", *changes, given).values()
    assert own.scenario.kernels is not None and own.scenario.kernels.fused_all_reduce_mb == 3


def test_the_capability_is_the_chips() -> None:
    known = {"h100-80g-sxm": "90", "h200-sxm": "90", "b200-sxm": "100", "gb200": "100"}
    known |= {"b300-sxm": "103", "a100-80g-sxm": "", "l40s": ""}
    assert {name: capability(load_device(name)) for name in known} == known
