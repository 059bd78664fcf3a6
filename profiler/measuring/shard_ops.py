"""Every op of a plan as a timed call, with inputs and rotating buffers. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F

from sarathi_sim.profiler.facts.formats import Distribution, Kernels
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import MOE, OPS
from sarathi_sim.profiler.measuring.fused import fused_layer, slots_of
from sarathi_sim.profiler.planning.designed import skewed_contexts
from sarathi_sim.profiler.planning.grid import Key
from sarathi_sim.profiler.planning.journal import Timing
from sarathi_sim.profiler.planning.settings import FlushMode, Limits
from sarathi_sim.profiler.shard.attention import (
    Attention,
    KVCache,
    decode_step,
    prefill_step,
)
from sarathi_sim.profiler.shard.failures import guarded
from sarathi_sim.profiler.shard.layer import ShardLayer
from sarathi_sim.profiler.shard.timing import Timer

#: On a CPU the weights rotate over sets of this many bytes in all, so that they are not in a cache
#: (a layer's are not, after the other layers ran). On a GPU the timer flushes the L2; where it does
#: not, the copies of the smallest matrix are this many bytes.
_COLD_BYTES = {"cpu": 96 * 2**20, "cuda": 256 * 2**20}
_MOST_COPIES = {"cpu": 8, "cuda": 64}
#: The ops that are one call of an attention kernel.
ATTENTION_POINTS = ("attn_prefill", "attn_decode", "attn_decode_skew")


class ShardOps:
    """Times the ops of one TP shard. ``budget_bytes`` bounds weights and KV cache and inputs.

    A point that needs more is not run: its Timing says so. Raises ValueError where the weights
    alone do not fit.
    """

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
        self.layer = ShardLayer(model, tp, device, dtype, copies, fp8=fp8)
        head = self.layer.shapes["lm_head"]
        self._head = self.layer.random(head.n, head.k, scale=head.k**-0.5)
        self._table = self.layer.random(model.vocab_size, model.hidden_size)
        self._positions: torch.Tensor | None = None
        if model.learned_positions:
            self._positions = self.layer.random(model.max_position_embeddings, model.hidden_size)
        layer = self.layer
        kv_bytes = 2 * layer.kv_heads * model.head_dim * self.size
        # Half of what is left at most: the inputs, outputs and masks come on top.
        affordable = int((budget_bytes - fixed) / 2 / kv_bytes)
        wanted = needs["kv_cache"] // kv_bytes
        self.cache = KVCache(
            max(limits.max_context, min(wanted, affordable)),
            layer.kv_heads, model.head_dim, device, dtype,
        )  # fmt: skip
        self._spare = budget_bytes - fixed - self.cache.tokens * kv_bytes

    def measure(self, op: str, key: Key) -> Timing:
        """Time one point; a Timing without a time, and with a note, where that fails."""
        self.attention.kernel = None
        timing = self._guarded(op, key, lambda: self.timer(self.call(op, key)))
        if op in ATTENTION_POINTS and self.attention.kernel:
            return replace(timing, kernel=f"{self.attention.library} {self.attention.kernel}")
        return timing

    def probe(self, op: str, key: Key) -> Timing:
        """Roughly: the wall-clock time of a second call. Fails as :meth:`measure` does."""
        return self._guarded(op, key, lambda: self._once(self.call(op, key)))

    def sustained(self, key: Key, seconds: float) -> tuple[Timing, Timing]:
        """A ``mixed`` layer back to back for so long: its time at the start and at the end.

        The caches are as warm as in that layer's own loop, so only the two compare.
        """
        first = guarded(
            lambda: self.timer.without_pause(self.call("mixed", key), min(0.5, seconds)),
            self.device,
        )
        if first.time_us is None:
            return first, first
        last = guarded(
            lambda: self.timer.without_pause(self.call("mixed", key), seconds, seconds / 4),
            self.device,
        )
        return first, last

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
        need, room = _slots(op, key), self.cache.tokens
        if need > room:
            return f"needs {need} KV slots, and memory holds {room}"
        size = self._input_bytes(op, key)
        if size > self._spare:
            return f"needs {size / 1e9:.2f} GB beside the weights, {self._spare / 1e9:.2f} are free"
        return ""

    def call(self, op: str, key: Key) -> Callable[[int], object]:
        """``call(i)`` runs the op once on the i-th set of buffers."""
        if op == "attn_prefill":
            return self._prefill(*key)
        if op == "attn_decode":
            return self._decode(*key)
        if op == "attn_decode_skew":
            return self._skewed_decode(*key)
        if op == "mixed":
            return self.fused_layer(*key)
        return self._linear(op, key[0])

    def fused_layer(self, *key: int) -> Callable[[int], object]:
        """A ``mixed`` layer."""
        chunk, context, batch, held = key
        return fused_layer(
            self.layer, self.attention, self.cache, chunk, context, batch, held, self.distribution
        )

    def _input_bytes(self, op: str, key: Key) -> float:
        """A generous guess: two inputs and an output a token, and a mask for chunks."""
        model = self.model
        mask = 2 * key[0] * sum(key[:2]) * self.size
        if op == "attn_prefill":
            return float(mask + 8 * key[0] * self.layer.heads * model.head_dim * self.size)
        widest = max(sum((shape.n, shape.k)) for shape in self.layer.shapes.values())
        if (mix := model.experts) and op in (MOE, "mixed"):
            widest += mix.top_k * (model.hidden_size + 2 * mix.intermediate_size)
        if op == "mixed":
            return float(mask + 8 * (key[0] + key[2]) * widest * self.size)
        return float(4 * key[0] * widest * self.size)

    def _linear(self, op: str, tokens: int, fused: bool = False) -> Callable[[int], object]:
        layer, model, copies = self.layer, self.model, len(self.layer.sets)
        if op in layer.gemms:
            inputs = [layer.as_input(layer.random(tokens, layer.shapes[op].k)) for _ in range(2)]
            return lambda i: layer.gemm(op, inputs[i % 2], i % copies)
        if op == MOE:
            x = layer.random(tokens, model.hidden_size)
            routing = layer.routing(tokens, self.distribution)
            return lambda i: layer.moe(x, routing)
        if op == "lm_head":
            x = layer.random(tokens, model.hidden_size)
            return lambda i: F.linear(x, self._head)
        if op == "embedding":
            rows = [self._token_ids(tokens, i) for i in range(2)]
            positions = torch.arange(tokens, device=self.device)
            positions = positions % model.max_position_embeddings
            return lambda i: self._embed(rows[i % 2], positions)
        if not OPS[op].rest:
            raise ValueError(f"nothing here measures the op {op}")
        x = layer.random(tokens, model.hidden_size)
        ffn = layer.random(tokens, layer.ffn_width)
        q = layer.random(tokens, layer.heads, model.head_dim)
        k = layer.random(tokens, layer.kv_heads, model.head_dim)
        angles = layer.angles(torch.arange(tokens, device=self.device))
        if fused:  # with one set of gains: the compiler would make kernels for each set
            return lambda i: self._compiled_others(x, ffn, q, k, angles, 0)
        return lambda i: layer.others(x, ffn, q, k, angles, i % copies)

    @cached_property
    def _compiled_others(self) -> Callable[..., object]:
        """``others`` fused by torch's compiler, once for all sizes."""
        compiled: Callable[..., object] = torch.compile(self.layer.others, dynamic=True)
        return compiled

    def fused_others(self, key: Key) -> Timing:
        """As :meth:`measure`, of ``others`` in fused kernels, as engines run it."""
        return guarded(lambda: self.timer(self._linear("others", key[0], fused=True)), self.device)

    def _token_ids(self, tokens: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.model.vocab_size, (tokens,), generator=generator)
        return ids.to(self.device)

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = F.embedding(ids, self._table)
        if self._positions is not None:
            out = out + F.embedding(positions, self._positions)
        return out

    def _new_tokens(self, tokens: int) -> tuple[torch.Tensor, ...]:
        dim, layer = self.model.head_dim, self.layer
        return (
            layer.random(tokens, layer.heads, dim),
            layer.random(tokens, layer.kv_heads, dim),
            layer.random(tokens, layer.kv_heads, dim),
        )

    def _start(self, slots: int, index: int) -> int:
        """Where the index-th call's run of slots begins: calls walk through the pool."""
        return index * slots % max(1, self.cache.tokens - slots + 1)

    def _prefill(self, chunk: int, context: int) -> Callable[[int], object]:
        new, bias = self._new_tokens(chunk), self.attention.prefill_bias(chunk, context)
        slots = chunk + context
        return lambda i: prefill_step(
            self.attention, self.cache, self._start(slots, i), context, new, bias
        )

    def _decode(self, batch: int, context: int) -> Callable[[int], object]:
        stride = context + 1
        bias, new = self.attention.decode_bias(batch, context, stride), self._new_tokens(batch)
        slots = batch * stride
        return lambda i: decode_step(
            self.attention, self.cache, self._start(slots, i), stride, context, new, bias
        )

    def _skewed_decode(self, batch: int, mean: int, longest: int) -> Callable[[int], object]:
        contexts = skewed_contexts(batch, mean, longest)
        positions = torch.tensor(contexts, device=self.device)
        stride = longest + 1
        bias, new = self.attention.skewed_bias(contexts, stride), self._new_tokens(batch)
        slots = batch * stride
        return lambda i: decode_step(
            self.attention, self.cache, self._start(slots, i), stride, positions, new, bias
        )


def _slots(op: str, key: Key) -> int:
    """KV slots that an op takes beyond one sequence, for which there is always room."""
    if op == "attn_decode":
        return key[0] * (key[1] + 1)
    if op == "attn_decode_skew":
        return key[0] * (key[2] + 1)
    return slots_of(*key) if op == "mixed" else 0


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
