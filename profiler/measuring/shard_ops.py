"""Every op of a plan as a timed call, with inputs and rotating buffers; and the launch overhead of
a layer. Imports torch.

The calls are the engine's own: :class:`~sarathi_sim.profiler.shard.layer.ShardLayer` goes through
an iteration, stand-ins replace the results of ops, and the calls of one op are kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..facts.formats import Distribution, Kernels, exponent_of
from ..facts.layer_kinds import rows_of_experts
from ..facts.model import ModelSpec
from ..facts.ops import ATTENTION, DECODE, MOE, OPS, OTHERS, PREFILL
from ..planning.grid import (
    DESIGNED,
    MIXED,
    SKEWED,
    FlushMode,
    Key,
    Limits,
    Timing,
    skewed_contexts,
)
from ..shard.attention import Attention, Chunk, Decodes, KVCache, Routing, Rows
from ..shard.layer import LayerState, RandomWeights, ShardLayer
from ..shard.timing import Timer, guarded

#: On a CPU the weights rotate over sets of this many bytes in all, so that they are not in a cache
#: (a layer's are not, after the other layers ran). On a GPU the timer flushes the L2; where it does
#: not, the copies of the smallest matrix are this many bytes.
_COLD_BYTES = {"cpu": 96 * 2**20, "cuda": 256 * 2**20}
_MOST_COPIES = {"cpu": 8, "cuda": 64}
#: After so many calls a point meets the same slots of the KV cache again.
_TURNS = 64
#: Numbers of which stand-ins are made, at multiples of as many as a kernel may load at once.
_NUMBERS, _ALIGNED = 2**22, 128
#: The ops that are one call of an attention kernel.
ATTENTION_POINTS = (*ATTENTION, SKEWED)

Calls = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""The calls of an op, and the inputs of each."""


class ShardOps:
    """Times the ops of one TP shard. ``budget_bytes`` bounds weights and KV cache and inputs. A
    point that needs more is not run: its Timing says so. Raises ValueError where the weights alone
    do not fit."""

    def __init__(
        self,
        model: ModelSpec,
        tp: int,
        device: torch.device,
        dtype: torch.dtype,
        limits: Limits,
        timer: Timer,
        budget_bytes: float,
        attention: Attention,
        fp8: bool = False,
        distribution: Distribution = Kernels.expert_distribution,
    ) -> None:
        self.model, self.timer, self.attention = model, timer, attention
        self.distribution = distribution
        self.size = torch.finfo(dtype).bits // 8
        self.device, self.dtype = device, dtype
        copies = weight_copies(model, tp, self.size, device.type, timer.flush)
        needs = memory_needs(model, tp, self.size, limits, copies)
        fixed = needs["weights"] + needs["tables"]
        if fixed > 0.9 * budget_bytes:
            raise ValueError(
                f"{model.name} tp {tp}: one layer's weights need {fixed / 1e9:.2f} GB and "
                f"{budget_bytes / 1e9:.2f} GB are free; use a larger tp"
            )
        self.needs = needs
        self.layer = layer = ShardLayer(model, tp, device, dtype, fp8=fp8)
        drawn = RandomWeights(model, tp, None, device, dtype, fp8=fp8)
        self.sets = [drawn.layer(index) for index in range(copies)]
        self._ends = drawn.ends()
        kv_bytes = 2 * layer.kv_heads * model.head_dim * self.size
        # At most half of the free memory: inputs, outputs and masks need the rest.
        affordable = min(needs["kv_cache"], (budget_bytes - fixed) / 2)
        slots = max(limits.max_context, int(affordable // kv_bytes))
        self.cache = KVCache(slots, layer.kv_heads, model.head_dim, device, dtype)
        self._spare = budget_bytes - fixed - slots * kv_bytes
        self._numbers = torch.randn(_NUMBERS, device=device).to(dtype)
        self._taken = 0

    def measure(self, op: str, key: Key) -> Timing:
        """Time one point; if it fails, a Timing without a time, and with a note."""
        self.attention.kernel = None
        timing = self._guarded(
            op,
            key,
            lambda: self.timer(self.call(op, key)),
        )
        if op in ATTENTION_POINTS and self.attention.kernel:
            return replace(timing, kernel=f"{self.attention.library} {self.attention.kernel}")
        return timing

    def probe(self, op: str, key: Key) -> Timing:
        """Roughly: the wall-clock time of a second call. Fails as :meth:`measure` does."""
        return self._guarded(op, key, lambda: self._once(self.call(op, key)))

    def launch(self, key: Key) -> Timing:
        """The host's time to enqueue a ``mixed`` layer."""
        return guarded(lambda: self.timer.launch(self.call(MIXED, key)), self.device)

    def sustained(self, key: Key, seconds: float) -> tuple[Timing, Timing]:
        """A ``mixed`` layer back to back for so long: its time at the start and at the end. The
        layer must take longer than its launch: else both are the host's times. The caches are as
        warm as in that layer's own loop, so only the two compare."""

        def timed(*span: float) -> Timing:
            run = self.timer.without_pause
            return guarded(lambda: run(self.call(MIXED, key), *span), self.device)

        first = timed(min(0.5, seconds))
        return first, first if first.time_us is None else timed(seconds, seconds / 4)

    def _once(self, call: Callable[[int], object]) -> Timing:
        with torch.inference_mode():
            for index in range(2):
                began = time.perf_counter()
                call(index)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
        return Timing((time.perf_counter() - began) * 1e6)

    def _guarded(self, op: str, key: Key, measure: Callable[[], Timing]) -> Timing:
        if misfit := self._misfit(op, key):
            return Timing(None, note=misfit)
        return guarded(measure, self.device)

    def _misfit(self, op: str, key: Key) -> str:
        """The reason why a point does not fit in memory; empty if it fits."""
        need, room = _slots(*_sequences(op, key)), self.cache.tokens
        if need > room and op in (DECODE, *DESIGNED):  # for one sequence there is always room
            return f"needs {need} KV slots, and memory holds {room}"
        size = self._input_bytes(op, key)
        if size > self._spare:
            return f"needs {size / 1e9:.2f} GB beside the weights, {self._spare / 1e9:.2f} are free"
        return ""

    def _input_bytes(self, op: str, key: Key) -> float:
        """A generous guess: two inputs and an output a token, and a mask for chunks."""
        model = self.model
        mask = 2 * key[0] * sum(key[:2]) * self.size
        if op == PREFILL:
            return float(mask + 8 * key[0] * self.layer.heads * model.head_dim * self.size)
        widest = max(sum((shape.n, shape.k)) for shape in self.layer.shapes.values())
        if (mix := model.experts) and op in (MOE, MIXED):
            widest += mix.top_k * (model.hidden_size + 2 * mix.intermediate_size)
        if op == MIXED:
            return float(mask + 8 * (key[0] + key[2]) * widest * self.size)
        return float(4 * key[0] * widest * self.size)

    def call(self, op: str, key: Key) -> Callable[[int], object]:
        """``call(i)`` runs the op once on the i-th set of buffers; a ``mixed`` layer whole. Calls
        walk through the pool of KV slots, so that these are as cold as the weights."""
        chunk, context, contexts = _sequences(op, key)
        rows = self._rows(chunk, context, contexts, op)
        slots = _slots(chunk, context, contexts) if op in (*ATTENTION_POINTS, MIXED) else 0
        room = self.cache.tokens - slots + 1
        layers = [
            LayerState(
                self.sets[turn % len(self.sets)], self.cache.part(turn * slots % room, slots)
            )
            for turn in range(_TURNS)
        ]
        if op == MIXED:
            self._taken = 0
            x = self._stand_in(chunk + len(contexts), self.model.hidden_size)
            return lambda i: self.layer.run(layers[i % _TURNS], x, rows)
        calls = self._calls(DECODE if op == SKEWED else op, rows)
        if OPS[DECODE if op == SKEWED else op].part != "layer":
            return lambda i: [call(self._ends, *inputs) for call, inputs in calls]
        return lambda i: [call(layers[i % _TURNS], *inputs) for call, inputs in calls]

    def _rows(self, chunk: int, context: int, contexts: list[int], op: str) -> Rows:
        """Of a chunk after ``context`` tokens and of decodes, whose slots follow those of it."""
        positions = torch.cat([torch.arange(context, context + chunk), torch.tensor(contexts)])
        positions = positions.to(self.device, torch.int64)
        rows, longest = len(positions), self.model.max_position_embeddings
        generator = torch.Generator().manual_seed(0)
        return Rows(
            self.layer.angles(positions),
            [Chunk(self.attention, chunk, context)] if chunk else [],
            Decodes.in_a_row(self.attention, contexts, self.device, chunk + context)
            if contexts
            else None,
            positions % longest,
            torch.randint(
                self.model.vocab_size,
                (rows,),
                generator=generator,
            ).to(self.device),
            torch.arange(rows, device=self.device) if op in OPS and OPS[op].outputs else None,
            self.routing(rows) if op in (MOE, MIXED) and self.model.experts else None,
        )

    def routing(self, tokens: int) -> Routing:
        """Experts for each of ``tokens``, spread as ``distribution`` says; weights that add to 1. A
        run of as many rows as an expert has is dealt to the tokens in turn, so a token never meets
        it twice."""
        mix = self.model.experts
        assert mix is not None
        exponent = exponent_of(self.distribution)
        rows = rows_of_experts(mix.num_experts, mix.top_k, tokens, exponent)
        dealt = np.repeat(np.arange(mix.num_experts), rows).reshape(mix.top_k, tokens)
        chosen = torch.from_numpy(np.ascontiguousarray(dealt.T)).to(self.device)
        return chosen, self._stand_in(tokens, mix.top_k).softmax(-1)

    def _calls(self, op: str, rows: Rows) -> Calls:
        """The calls of an op in a layer, or beside it. Raises ValueError without any."""
        found: Calls = []
        shapes = self.layer.shapes

        def do(name: str, call: Callable[..., Any], state: object, *inputs: Any) -> Any:
            if name == op:
                x, *more = inputs
                if name in shapes and OPS[name].part == "layer":
                    x = self.layer.as_input(x)
                found.append((call, (x, *more)))
            if name == OTHERS:
                return call(state, *inputs)
            if name in ATTENTION:
                return self._stand_in(*inputs[0].shape)
            width = shapes[name].n if name in shapes else self.model.hidden_size
            return self._stand_in(len(inputs[0]), width)

        self._taken = 0
        self.layer.forward(
            [LayerState(self.sets[0], self.cache)],
            self._ends,
            rows,
            do=do,
        )
        if not found:
            raise ValueError(f"nothing here measures the op {op}")
        return found

    def _stand_in(self, *shape: int) -> Tensor:
        """Normal numbers, which no other stand-in of the same iteration has."""
        count, first = math.prod(shape), self._taken
        if first + count > _NUMBERS:
            return self._numbers.repeat(-(-count // _NUMBERS))[:count].view(shape)
        self._taken += -(-count // _ALIGNED) * _ALIGNED
        return self._numbers[first : first + count].view(shape)

    def fused_others(self, key: Key) -> Timing:
        """As :meth:`measure`, for ``others`` in fused kernels, as engines run it."""

        def measure() -> Timing:
            inputs = [each for _, each in self._others(key[0])]
            return self.timer(lambda i: self._compiled(inputs))

        return guarded(measure, self.device)

    def _others(self, tokens: int) -> Calls:
        return self._calls(OTHERS, self._rows(tokens, 0, [], OTHERS))

    @cached_property
    def _compiled(self) -> Callable[..., object]:
        """``others`` fused by torch's compiler, once for all sizes. With one layer's gains: the
        compiler would make kernels for each."""
        calls = [call for call, _ in self._others(1)]
        layer = LayerState(self.sets[0], self.cache)

        def others(inputs: list[tuple[Any, ...]]) -> list[Any]:
            return [call(layer, *each) for call, each in zip(calls, inputs, strict=True)]

        compiled: Callable[..., object] = torch.compile(others, dynamic=True)
        return compiled


def _sequences(op: str, key: Key) -> tuple[int, int, list[int]]:
    """A point's chunk, the tokens cached before it, and the contexts of its decodes."""
    if op == MIXED:
        return key[0], key[1], [key[3]] * key[2]
    if op == SKEWED:
        return 0, 0, skewed_contexts(*key)
    if op == DECODE:
        return 0, 0, [key[1]] * key[0]
    return key[0], key[1] if op == PREFILL else 0, []


def _slots(chunk: int, context: int, contexts: list[int]) -> int:
    return chunk + context + len(contexts) * (max(contexts, default=0) + 1)


def weight_copies(model: ModelSpec, tp: int, size: int, device: str, flush: FlushMode) -> int:
    """Sets of layer weights to rotate over."""
    if device == "cpu":
        rotated, fewest = model.layer_weights(tp) * size, 1
    elif flush == "rotate":
        gemms = model.gemms(tp)
        matrices = (gemm.n * gemm.k for op, gemm in gemms.items() if OPS[op].part == "layer")
        rotated, fewest = min(matrices) * size, 4
    else:
        return 1
    return max(fewest, min(_MOST_COPIES[device], -(-_COLD_BYTES[device] // rotated)))


def memory_needs(
    model: ModelSpec, tp: int, size: int, limits: Limits, copies: int
) -> dict[str, int]:
    """Bytes a profile takes on one device: weights, tables, KV cache, largest input."""
    gemms, kv_heads = model.gemms(tp), model.heads_per_rank(tp)[1]
    positions = model.max_position_embeddings if model.learned_positions else 0
    tables = (gemms["lm_head"].n + model.vocab_size + positions) * model.hidden_size
    widest = max(shape.n + shape.k for shape in gemms.values())
    held, mix = model.layer_weights(tp) * copies, model.experts
    if mix:  # of all experts, once; a token meets some
        met = mix.top_k * model.expert_parameters // tp
        held += mix.num_experts * model.expert_parameters // tp - met * copies
    slots = max(limits.max_batch, 2) * limits.max_context
    return {
        "weights": held * size,
        "tables": tables * size,
        "kv_cache": slots * 2 * kv_heads * model.head_dim * size,
        "inputs": max(4 * limits.max_tokens * widest, limits.max_context**2 // 2) * size,
    }


_OVERHEAD_CONTEXT = 16


def overheads(ops: ShardOps) -> dict[str, Callable[[], Timing]]:
    """The measurement of each of ``OVERHEADS`` that this device has. A layer of one decode with a
    short cache is launched, and run: kernel by kernel, and on a GPU as a CUDA graph."""

    def layer() -> Callable[[int], object]:
        return ops.call(MIXED, (0, 0, 1, _OVERHEAD_CONTEXT))

    if ops.device.type == "cpu":
        return {
            "layer_run": lambda: ops.timer(layer()),
            "layer_launch": lambda: ops.timer(_narrow_layer(ops)),
        }

    def replay() -> Callable[[int], object]:
        with torch.inference_mode():
            call = layer()
            return _captured(lambda: call(0))

    return {
        "layer_run": lambda: ops.timer(layer()),
        "layer_launch": lambda: ops.timer.launch(layer()),
        "layer_graph_run": lambda: ops.timer(replay()),
        "layer_graph_launch": lambda: ops.timer.launch(replay()),
    }


def _narrow_layer(ops: ShardOps) -> Callable[[int], object]:
    """The same calls on tiny matrices, whose time is Python and dispatch alone."""
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
    limits = Limits(max_tokens=1, max_context=_OVERHEAD_CONTEXT, max_batch=1)
    narrow_ops = ShardOps(
        narrow, 1, ops.device, ops.dtype, limits, ops.timer, math.inf, ops.attention
    )
    return narrow_ops.call(MIXED, (0, 0, 1, 1))


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

    def replay(index: int, inputs: object = call) -> None:  # the graph reads ``call``'s inputs
        graph.replay()

    return replay


def advice(device: str, layers: int, time_us: Mapping[str, float]) -> str:
    """A message for the user: the time of a small batch's iteration beyond its op times. Empty
    where what it takes could not be measured."""
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
