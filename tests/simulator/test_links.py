"""Links other than the measured ones: rings by hand, and deployments that differ in a link."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.profiler.facts.ops import ALL_REDUCE
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.op_times.op_times import Reduce, Route
from tests.experiments.small_config import deployed

SLOW = Route("pcie", 10e9, 5e-6)
NET = Route("tcp", 1e9, 100e-6)


def measured(num_bytes: Any) -> Any:
    """8 us, and 100 GB/s."""
    return 8e-6 + np.asarray(num_bytes) / 100e9


def test_a_ring_by_hand() -> None:
    # Four ranks: six messages of 250 kB, each 5 us + 25 us.
    assert SLOW.ring_s(np.array(1e6), 4) == pytest.approx(6 * 30e-6)
    assert SLOW.ring_s(np.array(1e6), 1) == 0


def test_an_all_reduce_over_a_slower_link_and_between_nodes_by_hand() -> None:
    size = np.array([1e6])
    alone = Reduce(measured, 1, 1, None, True, NET)
    assert alone(size) == pytest.approx(18e-6)
    # Two ranks, each way 5 us + 50 us, after the 8 us of a small one.
    over = Reduce(measured, 2, 1, SLOW, True, NET)
    assert over(size) == pytest.approx(8e-6 + 2 * 55e-6, rel=1e-5)
    # Two nodes of four: each GPU sends its quarter, 250 kB, in two halves to its peer.
    assert Reduce(measured, 4, 2, None, True, NET)(size) == pytest.approx(18e-6 + 2 * 225e-6)


def test_a_slower_link_is_never_faster_than_measured_and_a_faster_one_may_be() -> None:
    fast = Route("nvlink", 1e12, 0.0)
    size = np.array([1e9])
    assert Reduce(measured, 2, 1, fast, True, NET)(size) == measured(size)
    assert Reduce(measured, 2, 1, fast, False, NET)(size) == pytest.approx(8e-6 + 1e-3, rel=1e-4)


FILE = """
name: one
model: llama-3-8b
device: {device}
stack: vllm
workload: {{requests: 1, lengths: {{kind: fixed, prompt: 100, decode: 10}}}}
policy: {{name: vllm, max_num_batched_tokens: 512, max_num_seqs: 8}}
kv_cache: {{}}
cluster: {{max_length: 1024, {cluster}}}
engine: {{fi_allreduce_fusion_max_size_mb: 0}} # all-reduces of all links are the same kernel
"""


def deployment(cluster: str, device: str = "h100-80g-sxm") -> Deployment:
    (found,) = deployed(FILE.format(device=device, cluster=cluster)).values()
    return found


def reduce_s(found: Deployment, num_bytes: float = 1e6) -> float:
    assert found.ops.all_reduce is not None
    return float(found.ops.all_reduce(np.array([num_bytes]))[0])


def test_without_keys_the_measured_link_is_meant() -> None:
    plain = deployment("tp: 4")
    named = deployment("tp: 4, intra_node: {kind: nvlink}")
    assert plain.ops is named.ops
    assert plain.ops.meta.environment[ALL_REDUCE].startswith("measured")


def test_pcie_is_slower_and_without_peer_access_slower_still() -> None:
    plain, peers, host = (
        deployment(f"tp: 4, intra_node: {{{link}}}")
        for link in ("kind: nvlink", "kind: pcie_peer", "kind: pcie")
    )
    assert reduce_s(plain) < reduce_s(peers) < reduce_s(host)
    assert "16 GB/s" in host.ops.meta.environment[ALL_REDUCE]
    kernels = host.ops.meta.kernels
    assert kernels is not None and kernels.half_width_pct[ALL_REDUCE] == 50


def test_a_device_without_peer_access_says_so_and_a_user_may_know_better() -> None:
    device = "rtx-pro-6000"
    assumed, peers = (
        deployment(f"tp: 2, {key}", device) for key in ("pp: 1", "intra_node: {kind: pcie_peer}")
    )
    assert peers.ops.meta.environment[ALL_REDUCE].startswith("measured")
    assert reduce_s(assumed) > 2 * reduce_s(peers)


def test_tensor_parallelism_between_nodes_costs_its_network() -> None:
    inside = deployment("tp: 4")  # what the GPUs of one node take
    fast, slow = (
        deployment(f"tp: 8, gpus_per_node: 4, inter_node: {{kind: {kind}}}")
        for kind in ("infiniband", "tcp")
    )
    # Two nodes of four: two messages of 125 kB; TCP's 5 GB/s are shared by four.
    of_fast = 2 * (10e-6 + 125e3 / 50e9)
    assert reduce_s(fast) == pytest.approx(reduce_s(inside) + of_fast)
    assert reduce_s(slow) == pytest.approx(reduce_s(inside) + 2 * (60e-6 + 125e3 / 1.25e9))
    beyond = deployment("tp: 8, gpus_per_node: 2")
    assert reduce_s(beyond) > reduce_s(fast)
    pair, alone = (deployment(f"tp: {tp}, gpus_per_node: {tp // 2}") for tp in (4, 2))
    in_pair = reduce_s(deployment("tp: 2"))
    # Two messages of 250 kB; one GPU a node has nothing to add up there, and sends 500 kB.
    assert reduce_s(pair) == pytest.approx(in_pair + 2 * (10e-6 + 250e3 / 50e9))
    assert reduce_s(alone) == pytest.approx(2 * (10e-6 + 500e3 / 50e9))


def test_trays_of_one_rack_are_joined_by_nvlink() -> None:
    """GB200's trays of four: two messages of 125 kB over NVLink, without a network's latency."""
    tray, two = (deployment(f"tp: {tp}", "gb200") for tp in (4, 8))
    assert reduce_s(two) == pytest.approx(reduce_s(tray) + 2 * (2e-6 + 125e3 / 900e9))
    assert "nvlink" in two.ops.meta.environment[ALL_REDUCE]
    named = deployment("tp: 8, inter_node: {kind: infiniband}", "gb200")
    assert reduce_s(named) == pytest.approx(reduce_s(two) + 2 * 8e-6)


def test_sends_take_the_link_that_is_named() -> None:
    found = deployment("tp: 2, pp: 2, gpus_per_node: 2, inter_node: {kind: tcp, bandwidth: 2.0e+9}")
    assert found.scope == "inter_node"
    # Hidden states and residual: 2 MB at 1 GB/s for each of two GPUs.
    assert found.ops.send["inter_node"](np.array(1e6)) == pytest.approx(60e-6 + 2e-3)
    assert "tcp" in found.ops.meta.environment["send_recv_inter_node"]


def test_the_devices_own_link_by_its_numbers() -> None:
    own = deployment("tp: 4")
    named = deployment("tp: 4, intra_node: {bandwidth: 450.0e+9}")
    assert reduce_s(named, 16e3) == pytest.approx(reduce_s(own, 16e3), rel=0.05)


@pytest.mark.parametrize(
    ("cluster", "device", "message"),
    [
        ("tp: 8, gpus_per_node: 3", "h100-80g-sxm", "at most 3, the GPUs of a node, or a multiple"),
        ("tp: 2, intra_node: {kind: nvlink}", "rtx-pro-6000", "bandwidth: is needed for NVLink on"),
        ("tp: 16, gpus_per_node: 16", "h100-80g-sxm", "gpus_per_node: value 16: must be at most 8"),
    ],
)
def test_links_that_cannot_be(cluster: str, device: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        deployment(cluster, device)
