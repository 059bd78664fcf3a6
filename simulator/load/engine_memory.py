"""The KV blocks of a serving engine on its GPUs: by its own formula, part by part.

At its start the engine measures the memory that is not KV cache. Weights follow from the model. The
peak of a forward pass, and the memory outside of torch, are assumed here unless given; the engine
prints both (vLLM: "PyTorch activation peak memory takes ...; non_torch_memory takes ...").

Sources: vLLM 0.8.3 and 0.19 ``gpu_worker.py``, ``determine_available_memory``; SGLang
``model_runner.py``, ``profile_max_num_token``; TensorRT-LLM ``_util.py``, ``KvCacheCreator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.formats import STACKS, TWO_BYTES, NumberBytes, Stack
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.simulator.load.capacity import CapacityError, stage_weight_bytes

#: Bytes of a logit: as a number; and where a sampler sorts rows: as bf16 (2) and fp32 (4), sorted
#: values and indices (12), the indices that CUB's segmented sort is given (8), its buffer (12).
#: Start-up logs agree: Llama-3-8B with 256 sequences 1.26 GiB (vllm-project/vllm, pull 10511), with
#: 1,024 sequences 4.76 GiB (llm-d-planner).
FP32, SORTED_LOGIT = 4, 38
#: Outside of torch on one GPU. Alone: 0.13 to 0.14 GiB (llm-d-planner). Beside tensor-parallel ones
#: it holds NCCL's buffers: 2.10 GiB (8 x A100 40 GB, vLLM V0; llm-d-planner, vLLM 0.19).
NON_TORCH_ALONE, NON_TORCH_SHARDED = 0.14 * 2**30, 2.10 * 2**30


@dataclass(frozen=True)
class Share:
    """The engine's setting for its share of a GPU's memory.

    ``of_rest``: the share is of what weights, activations and the rest leave. ``keeps_peak``:
    activations are to fit into what the share leaves. ``sampler_bytes`` a logit are alive at the
    peak of sampling.
    """

    of_rest: bool = False
    keeps_peak: bool = False
    sampler_bytes: int = FP32


SHARES = {
    "gpu_memory_utilization": Share(sampler_bytes=SORTED_LOGIT),  # vLLM, Sarathi-Serve
    "mem_fraction_static": Share(keeps_peak=True),  # SGLang
    "free_gpu_memory_fraction": Share(of_rest=True),  # TensorRT-LLM
}
#: The setting of each stack's engine.
STACK_SHARES: dict[Stack, str] = dict(zip(STACKS, SHARES, strict=True))


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of the stage that holds the fewest KV blocks; bytes.

    ``share`` of ``total_bytes`` is taken by the rule of ``setting``. ``assumed`` names the parts
    that were neither given nor measured. ``cuda_graph_bytes`` count in vLLM from 0.21 on; other
    engines capture their graphs in what the share leaves.
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

    @property
    def kv_bytes(self) -> float:
        """The bytes that the engine's formula leaves for the KV cache."""
        rule = SHARES[self.setting]
        if rule.keeps_peak:
            return self.share * (self.total_bytes - self.non_torch_bytes) - self.weight_bytes
        taken = self.weight_bytes + self.activation_bytes + self.non_torch_bytes
        taken += self.cuda_graph_bytes
        if rule.of_rest:
            return self.share * (self.total_bytes - taken)
        return self.share * self.total_bytes - taken

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
            "assumed: the data sheet's" if "memory" in self.assumed else "measured: the driver's"
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
            nccl = self.non_torch_bytes - NON_TORCH_ALONE
            found.append(("CUDA context", NON_TORCH_ALONE, "assumed: engines' logs"))
            if nccl > 0:
                found.append(("NCCL buffers", nccl, "assumed: engines' logs"))
        else:
            found.append(("outside of torch", self.non_torch_bytes, "given"))
        if self.cuda_graph_bytes:
            found.append(("CUDA graphs", self.cuda_graph_bytes, "given"))
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
        return f"{whole}; {listed}; {parts[-1][1] / 1e9:.2f} GB left over"


@dataclass(frozen=True)
class Step:
    """The size of a forward pass: tokens, and sampled rows; its bytes if given, or None."""

    tokens: int
    sequences: int
    activation_bytes: float | None = None
    non_torch_bytes: float | None = None
    cuda_graph_bytes: float = 0.0


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
) -> EngineMemory:
    """The memory of a GPU of the fullest stage under the engine's formula.

    A share ``kept`` of the tokens is in the cache (``capacity.kept_share``).
    Raises :class:`CapacityError` where not even two blocks fit.
    """
    non_torch = step.non_torch_bytes
    if non_torch is None:
        non_torch = NON_TORCH_SHARDED if tp > 1 else NON_TORCH_ALONE
    assumed = [
        name
        for name, given in (
            ("memory", device.reported_bytes),
            ("activations", step.activation_bytes),
            ("outside of torch", step.non_torch_bytes),
        )
        if given is None
    ]
    found = []
    cached = block_size * model.cached_numbers(tp) * numbers.kv
    for stage, count in enumerate(layers):
        peak = step.activation_bytes
        if peak is None:
            last = stage == len(layers) - 1
            peak = _peak_bytes(SHARES[setting], model, tp, step, numbers.activation, last=last)
        found.append(
            EngineMemory(
                setting,
                share,
                total_bytes=device.reported_bytes or device.memory_bytes,
                weight_bytes=stage_weight_bytes(model, layers, stage, numbers, tp) / tp,
                activation_bytes=peak,
                non_torch_bytes=non_torch,
                block_bytes=count * (cached if kept == 1 else kept * cached),
                assumed=tuple(assumed),
                cuda_graph_bytes=step.cuda_graph_bytes,
            )
        )
    fullest = min(found, key=lambda memory: memory.num_blocks)
    if fullest.num_blocks < 2:
        raise CapacityError(
            f"{model.name} leaves no room for KV blocks of {block_size} tokens on {device.name} "
            f"with tp {tp} and {len(layers)} stages: {fullest.text()}; use a larger tp or pp, or "
            "another share"
        )
    return fullest


def _peak_bytes(
    rule: Share, model: ModelSpec, tp: int, step: Step, dtype_bytes: int, *, last: bool
) -> float:
    """The peak memory: a layer's widest tensors, or on the last stage logits during sampling.

    The ranks gather whole rows of logits. Of a forward pass hidden states stay meanwhile.
    """
    shard = model.shard(tp)
    # Gate and up, and their product; of experts for each one chosen, and their output.
    inner = max(shard.ffn, shard.shared_ffn) * (3 if shard.gated_ffn else 2)
    if model.experts is not None:
        width = -(-model.experts.intermediate_size // tp)
        each = max(2 * width, model.hidden_size) + width
        inner = max(inner, model.experts.top_k * each)
    row = dtype_bytes * model.hidden_size
    forward = step.tokens * (2 * row + dtype_bytes * inner)
    if not last:
        return float(forward)
    sampled = min(step.sequences, step.tokens)
    return float(max(forward, step.tokens * row + rule.sampler_bytes * sampled * model.vocab_size))
