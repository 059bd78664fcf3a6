"""The launch overhead of a layer for the smallest batch. Imports torch.

Op times on a GPU hold no launches, because kernels queue behind each other. If a layer takes longer
to launch than to run, the GPU waits, and only a CUDA graph helps. On a CPU a launch is a dispatch,
and part of every op's time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import torch

from sarathi_sim.profiler.measuring.shard_ops import ShardOps
from sarathi_sim.profiler.planning.designed import MIXED
from sarathi_sim.profiler.planning.journal import Timing, relative_iqr
from sarathi_sim.profiler.planning.settings import Limits

_CONTEXT = 16


def overheads(ops: ShardOps) -> dict[str, Callable[[], Timing]]:
    """What measures each of ``OVERHEADS`` that this device has.

    A layer of one decode with a short cache is launched, and run: kernel by kernel, and on a GPU as
    a CUDA graph.
    """

    def layer() -> Callable[[int], object]:
        return ops.call(MIXED, (0, 0, 1, _CONTEXT))

    if ops.device.type == "cpu":
        return {
            "layer_run": lambda: ops.timer(layer()),
            "layer_launch": lambda: ops.timer(_narrow_layer(ops)),
        }

    def replay() -> Callable[[int], object]:
        with torch.inference_mode():
            call = layer()
            return _captured(lambda: call(0))

    repeats = ops.timer.repeats
    return {
        "layer_run": lambda: ops.timer(layer()),
        "layer_launch": lambda: _host_time(layer(), repeats),
        "layer_graph_run": lambda: ops.timer(replay()),
        "layer_graph_launch": lambda: _host_time(replay(), repeats),
    }


def _narrow_layer(ops: ShardOps) -> Callable[[int], object]:
    """The same calls on matrices of next to nothing: what is left is Python and dispatch."""
    model, heads, kv_heads = ops.model, ops.layer.heads, ops.layer.kv_heads
    mix = model.experts
    if mix:
        mix = replace(
            mix, intermediate_size=16,
            shared_intermediate_size=16 if mix.shared_intermediate_size else 0,
        )  # fmt: skip
    narrow = replace(
        model, hidden_size=16, num_heads=heads, num_kv_heads=kv_heads, head_dim=2,
        ffn_hidden_size=0 if mix else 16, vocab_size=16, experts=mix,
    )  # fmt: skip
    limits = Limits(max_tokens=1, max_context=_CONTEXT, max_batch=1)
    narrow_ops = ShardOps(
        narrow, 1, ops.device, ops.dtype, limits, ops.timer, math.inf, ops.attention
    )
    return narrow_ops.call(MIXED, (0, 0, 1, 1))


@torch.inference_mode()
def _host_time(call: Callable[[int], object], repeats: int) -> Timing:
    """What the host takes to enqueue, the device being idle; one call in ten is a warm-up."""
    began = time.perf_counter()
    samples = []
    for number in range(11 * repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(0)
        if number >= repeats:
            samples.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    spread = round(relative_iqr(samples), 5)
    return Timing(median(samples) * 1e6, spread, len(samples), seconds=time.perf_counter() - began)


def _captured(call: Callable[[], object]) -> Callable[[int], object]:
    """Replays ``call`` as one CUDA graph; warm-ups run on another stream, as capturing requires."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(index: int, inputs: object = call) -> None:  # the graph reads what ``call`` holds
        graph.replay()

    return replay


def advice(device: str, layers: int, time_us: Mapping[str, float]) -> str:
    """A message for the user: the time of a small batch's iteration beyond its op times.

    Empty where what it takes could not be measured.
    """
    run, launch = time_us.get("layer_run"), time_us.get("layer_launch")
    if run is None or launch is None:
        return ""
    if device == "cpu":
        return (
            f"a layer of one decode takes {run:.0f} us, of which {launch:.0f} are dispatch; op "
            "times include it, so engine.turnaround_s need only hold the scheduler's own time"
        )
    waits_s = max(0.0, launch - run) * 1e-6 * layers
    text = (
        f"a layer of one decode takes {run:.0f} us on the GPU and {launch:.0f} us to launch: "
        f"{layers} layers wait {waits_s:.2g} s, which op times do not hold; suggested without CUDA "
        f"graphs: engine.turnaround_s {waits_s:.2g} (an upper bound: larger batches wait less)"
    )
    if "layer_graph_launch" in time_us:
        graph_run = time_us.get("layer_graph_run", run)
        graph_s = max(0.0, time_us["layer_graph_launch"] - graph_run) * 1e-6 * layers
        text += f", with graphs {graph_s:.2g} (a layer runs {graph_run:.0f} us in one)"
    return text
