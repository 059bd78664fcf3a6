"""The device of an engine's rank: the host's cores, or a GPU of its own. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.engine.work import EngineError
from sarathi_sim.profiler.shard.environment import devices_on_node, memory_bytes, open_device


@dataclass(frozen=True)
class Compute:
    """A device, and the communication of its ranks.

    ``backend`` is that of torch.distributed. ``apart``: activations are messages of their own, from
    device to device; else they are sent with the words that describe them.
    """

    device: torch.device
    dtype: torch.dtype
    backend: str
    apart: bool

    def wait(self) -> None:
        """Wait for the work launched here, but not for transfers, which have streams of their own:
        they would delay a stage until the next one takes its activations."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def open_compute(spec: EngineSpec, number: int) -> Compute:
    """The device of rank ``number``, checked; a rank a GPU, counted as torch sees them.

    Raises EngineError where there are too few GPUs or too little memory, ProfileError where the
    device or its dtype cannot be used at all.
    """
    device, dtype = open_device(spec.device, spec.dtype, spec.threads)
    if spec.device == "cpu":
        if number == 0:
            _check_memory("all ranks together", spec, range(spec.ranks))
        return Compute(device, dtype, "gloo", apart=False)
    gpus = devices_on_node("cuda", spec.threads)
    if gpus < spec.ranks:
        raise EngineError(
            f"pp {spec.pp} times tp {spec.tp} needs {spec.ranks} GPUs, one a rank; torch sees "
            f"{gpus} on this node"
        )
    torch.cuda.set_device(number)
    _check_memory(f"rank {number}", spec, [number])
    # NCCL sends tensors between GPUs; gloo sends the words that describe them.
    return Compute(torch.device("cuda", number), dtype, "cpu:gloo,cuda:nccl", apart=True)


def _check_memory(who: str, spec: EngineSpec, ranks: range | list[int]) -> None:
    needed = sum(spec.bytes_needed(number) for number in ranks)
    free = memory_bytes(spec.device)[1]
    if needed > 0.9 * free:
        blocks, block_size = spec.blocks
        what = "blocks" if spec.num_blocks else "sequences"
        raise EngineError(
            f"the engine needs {needed / 1e9:.1f} GB for weights and KV caches of {blocks} "
            f"{what} of {block_size} tokens ({who}), and {free / 1e9:.1f} GB are free: "
            f"take fewer or shorter {what}, or a smaller model"
        )
