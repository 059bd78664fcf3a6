"""The links of a deployment: what another link than the measured one takes."""

from __future__ import annotations

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.simulator.op_times.link_times import LinkTimes, Route
from .scenario import NetworkLink, NodeLink, Scenario

#: PCIe 5.0 x16, of a device whose own link is NVLink.
PCIE = 64e9
#: A message through the host's memory crosses PCIe twice and the memory bus as often: assumed. The
#: latency is longer by half of what NCCL's smallest message takes longer between two RTX 4090
#: without peer access (11.8 us, tinygrad/open-gpu-kernel-modules issue 17) than with it (5).
PEER_LATENCY_S = 2e-6
THROUGH_HOST, HOST_LATENCY_S = 0.25, PEER_LATENCY_S + 3.4e-6
#: AIConfigurator's assumption for all networks; RoCE's is assumed.
NETWORK_LATENCY_S = {"infiniband": 10e-6, "roce": 15e-6}
#: NCCL over sockets: 4 to 6 GB/s by an adapter of 100 Gb/s (NVIDIA/nccl issue 450); an all-reduce
#: of a few bytes on two nodes takes 120 us, two messages (issue 1184).
TCP_BANDWIDTH, TCP_LATENCY_S = 5e9, 60e-6


def node_gpus(scenario: Scenario, device: DeviceSpec) -> int:
    """The GPUs of a node."""
    return scenario.cluster.gpus_per_node or device.gpus_per_node


def links_of(scenario: Scenario, device: DeviceSpec) -> LinkTimes:
    """The links of a deployment, where they are others than those of the measurements."""
    cluster, node = scenario.cluster, node_gpus(scenario, device)
    within, between = cluster.intra_node or NodeLink(), cluster.inter_node or NetworkLink()
    own = device.intra_node
    measured = "nvlink" if own.bandwidth > PCIE else "pcie_peer"
    kind = within.kind or (measured if own.peers else "pcie")
    pcie = min(own.bandwidth, PCIE)
    known = {
        "nvlink": (own.bandwidth, PEER_LATENCY_S),
        "pcie_peer": (pcie, PEER_LATENCY_S),
        "pcie": (THROUGH_HOST * pcie, HOST_LATENCY_S),
    }
    bandwidth, latency_s = known[kind]
    usual_s = known[measured][1]
    other = kind != measured or within.bandwidth or within.latency_s is not None
    inside = Route(
        kind,
        within.bandwidth or bandwidth,
        latency_s if within.latency_s is None else within.latency_s,
    )
    rack = between.kind is None and PCIE < own.bandwidth <= device.inter_node.bandwidth
    network = "nvlink" if rack else between.kind or "infiniband"
    latency_s = PEER_LATENCY_S if rack else NETWORK_LATENCY_S.get(network, TCP_LATENCY_S)
    shared = min(cluster.tp, node) if network == "tcp" else 1
    rate = between.bandwidth or (TCP_BANDWIDTH if network == "tcp" else device.inter_node.bandwidth)
    outside = Route(
        network, rate / shared, latency_s if between.latency_s is None else between.latency_s
    )
    return LinkTimes(
        inside if other else None,
        outside if cluster.inter_node else None,
        outside,
        max(1, cluster.tp // node),
        inside.bandwidth <= own.bandwidth,
        max(0.0, inside.latency_s - usual_s),
    )
