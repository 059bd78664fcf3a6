"""How many KV tokens and sequences fit: by the paper's B = floor((M_G - M_S) / (L * m_kv)), and by
a serving engine's own formula, part by part.

At its start an engine measures the memory that is not KV cache. Weights follow from the model. The
peak of a forward pass, and the memory outside of torch, are assumed here unless given; the engine
prints both (vLLM: "PyTorch activation peak memory takes ...; non_torch_memory takes ..."). What
depends on the engine's version is in ``data/engines``.

Sources: vLLM 0.8.3 and 0.19 ``gpu_worker.py``, ``determine_available_memory``; SGLang
``model_runner.py``, ``profile_max_num_token``; TensorRT-LLM ``_util.py``, ``KvCacheCreator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from sarathi_sim.profiler.facts.device import DeviceSpec, engine_facts
from sarathi_sim.profiler.facts.formats import TWO_BYTES, NumberBytes, Stack
from sarathi_sim.profiler.facts.model import LayerParameters, ModelSpec
from sarathi_sim.profiler.storage.strict import UserError
from ..loop.records import Floats

MORE_GPUS = "a larger pp, or a larger tp where its all-reduces were measured"


class CapacityError(UserError):
    """A model, or one request of it, does not fit the memory."""


def stage_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each of ``pp`` pipeline stages: as even as possible, the longer stages first.
    Raises :class:`CapacityError` when there are more stages than layers."""
    if not 1 <= pp <= num_layers:
        raise CapacityError(f"pp is {pp}, but must be 1 to {num_layers}, the layers of the model")
    short, longer = divmod(num_layers, pp)
    return tuple(short + (stage < longer) for stage in range(pp))


def stage_weight_bytes(
    model: ModelSpec,
    layers: Sequence[int],
    stage: int,
    numbers: NumberBytes = TWO_BYTES,
    tp: int = 1,
) -> int:
    """Bytes of the weights one stage holds, over all its ``tp`` tensor-parallel ranks.

    The embedding table is on the first stage and the LM head on the last; with one stage, tied
    tables count once. Every rank has learned positions, routers and norms whole, and these are not
    quantized. With data-parallel attention (``numbers.dp``) these are the ranks of one group, which
    has its share of the routed experts, and all else.
    """
    parameters = 0
    table = model.vocab_size * model.hidden_size
    last = len(layers) - 1
    if stage == 0:
        parameters += table
        if model.learned_positions:
            parameters += tp * model.max_position_embeddings * model.hidden_size
    if stage == last and not (model.tied_embeddings and last == 0):
        parameters += table
    first = sum(layers[:stage])
    inside = model.parameters_in(range(first, first + layers[stage]), tp)
    return layer_weight_bytes(model, inside, numbers, parameters)


def layer_weight_bytes(
    model: ModelSpec, inside: LayerParameters, numbers: NumberBytes, plain: int = 0
) -> int:
    """Bytes of the weights of layers, and of ``plain`` further parameters."""
    routed = inside.routed
    if model.experts is not None and (numbers.dp, numbers.redundant_experts) != (1, 0):
        routed = round(routed * numbers.held_experts(model.experts.num_experts))
    weights = inside.matrices * numbers.weight + routed * numbers.expert_weight
    return int(weights + (inside.plain + plain) * numbers.activation)


def kv_capacity_tokens(
    model: ModelSpec,
    device: DeviceSpec,
    tp: int,
    layers: Sequence[int],
    usable_memory: float = 0.9,
    numbers: NumberBytes = TWO_BYTES,
    kept: float = 1.0,
) -> int:
    """KV tokens that one replica holds, which its fullest stage limits.

    A stage has ``tp`` GPUs, of whose memory M_G the fraction ``usable_memory`` may hold weights
    M_S and KV cache; a token takes m_kv bytes for the stage's layers. Where ``tp`` exceeds the KV
    heads these are replicated, and so are their bytes. A share ``kept`` of the tokens is in the
    cache (:func:`kept_share`). Raises :class:`CapacityError` when the
    weights alone do not fit.
    """
    memory = usable_memory * device.memory_bytes * tp
    capacity = []
    for stage, count in enumerate(layers):
        weights = stage_weight_bytes(model, layers, stage, numbers, tp)
        if weights >= memory:
            raise CapacityError(
                f"{model.name} does not fit: stage {stage} of {len(layers)} holds "
                f"{weights / 1e9:.1f} GB of weights, and {tp} x {device.name} have "
                f"{memory / 1e9:.1f} GB usable ({usable_memory:.0%}); use {MORE_GPUS}"
            )
        per_token = tp * model.cached_bytes(tp, numbers.kv) * count
        capacity.append(int((memory - weights) // (kept * per_token)))
    return min(capacity)


def kept_share(
    model: ModelSpec, prompt: Floats, output: Floats, tp: int = 1, numbers: NumberBytes = TWO_BYTES
) -> float:
    """The share of running sequences' tokens that a mean layer's cache keeps; 1 where all layers
    have attention over the whole context.

    A layer with a window keeps the tokens inside it; the state of a recurrent one counts as the
    tokens that take as many bytes. The mean is over the iterations of requests with so many prompt
    and output tokens, whose contexts grow from the one to the sum of both.
    """
    if (model.windows is None and model.recurrent is None) or not len(prompt):
        return 1.0
    context = prompt + output * np.linspace(0, 1, 17)[:, None]
    state = 0.0
    if model.recurrent is not None:
        state = model.recurrent.state_bytes(tp) / model.cached_bytes(tp, numbers.kv)
    kept = (model.kept_tokens(context, state) * output).sum()
    return float(kept / (context * output).sum())


def max_batch(capacity_tokens: int, max_length: int, micro_batches: int = 1) -> int:
    """Sequences of up to ``max_length`` tokens that each of ``micro_batches`` can hold. For GPT-3
    on A100s with 0.9 of 80e9 bytes and 4096 tokens this gives the paper's 11 (TP 8) and 27 (TP 8,
    PP 8, eight micro-batches). Raises :class:`CapacityError` when not even one fits."""
    total = capacity_tokens // max_length
    if total < micro_batches:
        raise CapacityError(
            f"the KV cache holds {capacity_tokens} tokens, too few for "
            f"{'a sequence' if micro_batches == 1 else f'{micro_batches} micro-batches'} of "
            f"{max_length}: lower max_length to at most {capacity_tokens // micro_batches}, or use "
            f"{MORE_GPUS}"
        )
    return total // micro_batches


@dataclass(frozen=True)
class Share:
    """The engine's setting for its share of a GPU's memory. ``of_rest``: it is a share of the
    memory left by weights, activations and other parts. ``keeps_peak``: activations must fit into
    the memory outside of the share."""

    engine: Stack
    of_rest: bool = False
    keeps_peak: bool = False


SHARES = {
    "gpu_memory_utilization": Share("vllm"),  # Sarathi-Serve, too
    "mem_fraction_static": Share("sglang", keeps_peak=True),
    "free_gpu_memory_fraction": Share("trtllm", of_rest=True),
}
#: The setting of each stack's engine.
STACK_SHARES: dict[Stack, str] = {rule.engine: setting for setting, rule in SHARES.items()}


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of the stage that holds the fewest KV blocks; bytes.

    ``share`` of ``total_bytes`` is taken by the rule of ``setting``. ``assumed`` names the parts
    that were neither given nor measured. ``cuda_graph_bytes`` count in vLLM from 0.21 on; other
    engines capture their graphs in the memory outside of the share. Of what is outside of torch
    ``collectives_bytes`` are those of NCCL and the like. A sequence of a model with recurrent
    layers has states of ``state_bytes``. They have a pool of their own, the share ``state_pool``
    of the cache (SGLang), or take blocks of it (0), which vLLM sizes so that one holds a state of
    as many recurrent layers as there are with attention: ``state_page`` bytes.
    """

    setting: str
    share: float
    total_bytes: float
    weight_bytes: float
    activation_bytes: float
    non_torch_bytes: float
    block_bytes: float
    assumed: tuple[str, ...]
    cuda_graph_bytes: float = 0.0
    collectives_bytes: float = 0.0
    state_bytes: float = 0.0
    state_pool: float = 0.0
    state_page: float = 0.0

    @property
    def cache_bytes(self) -> float:
        """The bytes that the engine's formula leaves for the KV cache and for states."""
        rule = SHARES[self.setting]
        if rule.keeps_peak:
            return self.share * (self.total_bytes - self.non_torch_bytes) - self.weight_bytes
        taken = self.weight_bytes + self.activation_bytes + self.non_torch_bytes
        taken += self.cuda_graph_bytes
        if rule.of_rest:
            return self.share * (self.total_bytes - taken)
        return self.share * self.total_bytes - taken

    @property
    def states(self) -> int | None:
        """The states in a pool of their own; None without one."""
        if not self.state_pool:
            return None
        return max(int(self.state_pool * self.cache_bytes // self.state_bytes), 0)

    @property
    def most_states(self) -> int:
        """The blocks of vLLM's size, one of which each running sequence needs for its states."""
        return max(int(self.cache_bytes // self.state_page), 0) if self.state_page else 0

    @property
    def state_blocks(self) -> int:
        """The blocks that the states of a sequence take; 0 where they have a pool."""
        return 0 if self.state_pool else -int(-self.state_bytes // self.block_bytes)

    @property
    def kv_bytes(self) -> float:
        """The bytes of the KV cache."""
        return (1 - self.state_pool) * self.cache_bytes

    @property
    def num_blocks(self) -> int:
        """Whole blocks, the null block included."""
        return max(int(self.kv_bytes // self.block_bytes), 0)

    @property
    def most_blocks(self) -> int:
        """The blocks that would fit beside the weights alone."""
        return max(int((self.total_bytes - self.weight_bytes) // self.block_bytes), 0)

    def as_json(self) -> dict[str, Any]:
        """The parts, the assumed ones, and the resulting blocks."""
        parts = {name: {"bytes": size, "how": how} for name, size, how in self.parts()}
        return {**asdict(self), "formula_blocks": self.num_blocks, "parts": parts}

    def parts(self) -> list[tuple[str, float, str]]:
        """Name, bytes and origin of everything in a GPU's memory; the origin begins with computed,
        measured, given or assumed."""
        memory = (
            "assumed: the data sheet" if "memory" in self.assumed else "measured: by the driver"
        )
        found = [
            ("memory", self.total_bytes, memory),
            ("weights", self.weight_bytes, "computed from the model"),
            (
                "activations",
                self.activation_bytes,
                "assumed: a layer's widest tensors, or logits and their sorting"
                if "activations" in self.assumed
                else "given",
            ),
        ]
        if "outside of torch" in self.assumed:
            nccl, logs = self.collectives_bytes, "assumed: engines' logs"
            found.append(("CUDA context", self.non_torch_bytes - nccl, logs))
            if nccl > 0:
                found.append(("NCCL buffers", nccl, logs))
        else:
            found.append(("outside of torch", self.non_torch_bytes, "given"))
        if self.cuda_graph_bytes:
            found.append(("CUDA graphs", self.cuda_graph_bytes, "given"))
        if self.states is not None:
            held = self.states * self.state_bytes
            found.append(("states", held, f"computed: {self.states:,} sequences' states"))
        cache = self.num_blocks * self.block_bytes
        rest = self.total_bytes - sum(size for _, size, _ in found[1:]) - cache
        blocks = f"computed: {self.num_blocks:,} blocks by {self.setting} {self.share:g}"
        left = "computed: " + ("" if self.cuda_graph_bytes else "CUDA graphs and ") + "fragments"
        return [*found, ("KV cache", cache, blocks), ("left over for", rest, left)]

    def text(self) -> str:
        """The parts as text, each with its origin's first word."""
        (_, total, how), *parts = self.parts()
        listed = ", ".join(
            f"{name} {size / 1e9:.2f} GB ({origin.split(':')[0].split()[0]})"
            for name, size, origin in parts[:-2]
        )
        whole = f"{self.setting} {self.share:g} of {total / 1e9:.2f} GB ({how})"
        if self.collectives_bytes and "outside of torch" in self.assumed:
            listed += "; kv_cache.non_torch_bytes sets context and buffers"
        return f"{whole}; {listed}; {parts[-1][1] / 1e9:.2f} GB left over"


@dataclass(frozen=True)
class Step:
    """The size of a forward pass: tokens, and sampled rows; its bytes if given, or None; and the
    engine's ``version`` (empty: the newest known) and ``sampler`` (empty: its own)."""

    tokens: int
    sequences: int
    activation_bytes: float | None = None
    non_torch_bytes: float | None = None
    cuda_graph_bytes: float = 0.0
    version: str = ""
    sampler: str = ""


class DrafterBytes(NamedTuple):
    """What a drafter takes on the last stage: its weights over all tensor-parallel ranks, and the
    keys and values of a token on one GPU."""

    weights: int = 0
    token: float = 0.0


NO_DRAFTER = DrafterBytes()


def drafter_bytes(
    drafter: ModelSpec, tp: int, numbers: NumberBytes, kept: float, *, whole: bool
) -> DrafterBytes:
    """The memory of a drafter's layers or, if it is a ``whole`` model, with an embedding and an LM
    head of its own. A share ``kept`` of its tokens is in its cache (:func:`kept_share`)."""
    count = drafter.num_layers
    weights = layer_weight_bytes(drafter, drafter.parameters_in(tp=tp), numbers)
    if whole:
        weights = stage_weight_bytes(drafter, (count,), 0, numbers, tp)
    return DrafterBytes(weights, count * kept * drafter.cached_bytes(tp, numbers.kv))


def engine_memory(
    model: ModelSpec,
    device: DeviceSpec,
    tp: int,
    layers: Sequence[int],
    block_size: int,
    setting: str,
    share: float,
    step: Step,
    numbers: NumberBytes = TWO_BYTES,
    kept: float = 1.0,
    beside: DrafterBytes = NO_DRAFTER,
) -> EngineMemory:
    """The memory of a GPU of the fullest stage under the engine's formula.

    A share ``kept`` of the tokens is in the cache (:func:`kept_share`) of a model with windows;
    states of recurrent layers are counted by the sequence. The last stage has a drafter ``beside``
    its layers. Raises :class:`CapacityError` where not even two blocks fit.
    """
    facts, version = engine_facts(SHARES[setting].engine), step.version
    alone, collectives = 2**30 * facts.at("alone_gib", version), 0.0
    if tp * numbers.dp > 1:  # ranks of data-parallel attention gather tokens for their experts
        collectives = 2**30 * facts.at("collectives_gib", version)
    non_torch = step.non_torch_bytes
    if non_torch is None:
        non_torch = alone + collectives
    assumed = [
        name
        for name, given in (
            ("memory", device.reported_bytes),
            ("activations", step.activation_bytes),
            ("outside of torch", step.non_torch_bytes),
        )
        if given is None
    ]
    ratio = 0.0
    if model.recurrent is not None and SHARES[setting].keeps_peak:
        ratio = facts.at("state_ratio", version)
    found = []
    for stage in range(len(layers)):
        peak = step.activation_bytes
        if peak is None:
            logit = facts.at("logit_bytes", version, sampler=step.sampler)
            logit *= stage == len(layers) - 1
            peak = _peak_bytes(model, tp, step, numbers.activation, logit)
        weights = stage_weight_bytes(model, layers, stage, numbers, tp)
        own = range(sum(layers[:stage]), sum(layers[: stage + 1]))
        block, states, page = _cached(model, own, tp, block_size, numbers, kept)
        if stage == len(layers) - 1:
            weights += beside.weights
            block += beside.token * block_size
        found.append(
            EngineMemory(
                setting,
                share,
                total_bytes=device.reported_bytes or device.memory_bytes,
                weight_bytes=weights / tp,
                activation_bytes=peak,
                non_torch_bytes=non_torch,
                block_bytes=block,
                assumed=tuple(assumed),
                cuda_graph_bytes=step.cuda_graph_bytes,
                collectives_bytes=collectives,
                state_bytes=states,
                state_pool=ratio / (1 + ratio),
                state_page=page,
            )
        )
    fullest = min(found, key=lambda memory: memory.num_blocks)
    if fullest.num_blocks < 2:
        raise CapacityError(
            f"{model.name} leaves no room for KV blocks of {block_size} tokens on {device.name} "
            f"with tp {tp} and {len(layers)} stages: {fullest.text()}; use {MORE_GPUS}, or another "
            "share"
        )
    return fullest


def _cached(
    model: ModelSpec,
    layers: range,
    tp: int,
    block_size: int,
    numbers: NumberBytes,
    kept: float,
) -> tuple[float, float, float]:
    """Bytes of a block of these layers, of a sequence's states, and of vLLM's block for a state: as
    many tokens of 16 that the state of a layer fits, in as many layers as there are with
    attention."""
    cached = block_size * model.cached_bytes(tp, numbers.kv)
    if model.recurrent is None:
        return len(layers) * (cached if kept == 1 else kept * cached), 0.0, 0.0
    full, rest = (len(model.kinds[k].intersection(layers)) for k in ("attention", "recurrent"))
    full, state = max(full, 1), model.recurrent.state_bytes(tp)
    return float(full * cached), float(rest * state), float(min(full, rest) * _up(state, cached))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _peak_bytes(model: ModelSpec, tp: int, step: Step, dtype_bytes: int, logit_bytes: int) -> float:
    """The peak memory: a layer's widest tensors, or logits during sampling, of ``logit_bytes`` each
    (0: no logits on this stage). The ranks gather whole rows of logits. Meanwhile the pass's hidden
    states stay in memory."""
    shard = model.shard(tp)
    # Gate and up, and their product; with experts, for each chosen expert, and their output.
    inner = max(shard.ffn, shard.shared_ffn) * (3 if shard.gated_ffn else 2)
    if model.experts is not None:
        width = -(-model.experts.intermediate_size // tp)
        each = max(2 * width, model.hidden_size) + width
        inner = max(inner, model.experts.top_k * each)
    row = dtype_bytes * model.hidden_size
    forward = step.tokens * (2 * row + dtype_bytes * inner)
    sampled = min(step.sequences, step.tokens)
    logits = step.tokens * row + logit_bytes * sampled * model.vocab_size
    return float(max(forward, logits if logit_bytes else 0))
