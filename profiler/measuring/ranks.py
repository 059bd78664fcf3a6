"""One rank of a timed collective: ``python -m sarathi_sim.profiler.measuring.ranks``. Imports
torch.

:mod:`sarathi_sim.profiler.measuring.measure` starts one such process a rank. Between nodes,
start two with torchrun (one per node) and give the file of rank 0 to
``sarathi-sim profile --set inter_node=FILE``::

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m sarathi_sim.profiler.measuring.ranks --backend nccl --send-recv 1024 65536 ... \\
        --out inter_node.jsonl

Rank 0 prints one JSON object a point: op, num_bytes, time_us, spread, samples.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..planning.grid import relative_iqr
from ..shard.rank_processes import channel_of_rank
from ..shard.timing import cuda_events, no_garbage_collection

_WARM_UPS = 5
#: A size whose times spread (relative interquartile range) more than this is timed again, at most
#: so often; the steadiest batch counts. On a CPU a neighbour can disturb all samples of a batch.
_STEADY = 0.2
_MOST_BATCHES = 4
#: Calls that a GPU's sample holds. They are enqueued while the GPU waits, so that no launch counts.
_IN_A_ROW = 20
_WAIT_CYCLES = 4_000_000


def main() -> None:
    """Parse the arguments, join the group, time every size, leave."""
    parser = argparse.ArgumentParser(prog="python -m sarathi_sim.profiler.measuring.ranks")
    parser.add_argument("parent", nargs="?", help="the process that started this one, if ours")
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    parser.add_argument("--store", help="a file to meet at; without it the variables of torchrun")
    parser.add_argument(
        "--rank",
        type=int,
        default=int(os.environ.get("RANK", "0")),
    )
    parser.add_argument(
        "--world",
        type=int,
        default=int(os.environ.get("WORLD_SIZE", "1")),
    )
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--all-reduce", type=int, nargs="*", default=[], metavar="BYTES")
    parser.add_argument("--send-recv", type=int, nargs="*", default=[], metavar="BYTES")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--out", type=Path, help="rank 0 writes here too")
    options = parser.parse_args()
    if options.out and options.rank == 0 and options.out.exists():
        parser.error(f"--out {options.out}: exists, so it is not overwritten: name another file")
    channel = channel_of_rank(Path(options.store).parent)[0] if options.store else None
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", options.rank)))
        torch.cuda.set_device(device)
    dist.init_process_group(
        options.backend,
        init_method=Path(options.store).absolute().as_uri() if options.store else "env://",
        rank=options.rank,
        world_size=options.world,
        timeout=timedelta(seconds=options.timeout),
    )
    lines = []
    with no_garbage_collection():
        for op, sizes in (("all_reduce", options.all_reduce), ("send_recv", options.send_recv)):
            for num_bytes in sizes:
                entry = _measure(op, num_bytes, device, options.dtype, options.repeats)
                if options.rank == 0 and channel is not None:
                    channel.send(entry)
                elif options.rank == 0:
                    lines.append(json.dumps(entry) + "\n")
                    sys.stdout.write(lines[-1])
                    sys.stdout.flush()
    if options.out and options.rank == 0:
        with options.out.open("x", encoding="utf-8") as file:
            file.writelines(lines)
    dist.barrier()
    os._exit(0)  # destroying a group can hang where a peer is gone already


def _measure(
    op: str, num_bytes: int, device: torch.device, dtype: str, repeats: int
) -> dict[str, str | int | float]:
    kind: torch.dtype = getattr(torch, dtype)
    # Zeros: sums of anything else would overflow after some repeats.
    tensor = torch.zeros(max(1, num_bytes // kind.itemsize), dtype=kind, device=device)
    rank = dist.get_rank()

    def all_reduce() -> None:
        _timed_region(lambda: dist.all_reduce(tensor), device, times)

    def there_and_back() -> None:
        if rank > 1:
            return
        _timed_region(lambda: _ping_pong(tensor, rank), device, times)

    times: list[float] = []
    batches: list[list[float]] = []
    for batch in range(_MOST_BATCHES):
        times.clear()
        warm_ups = 0 if batch else _WARM_UPS
        for _ in range(warm_ups + repeats):
            dist.barrier()
            all_reduce() if op == "all_reduce" else there_and_back()
        batches.append(_agreed(op, times[warm_ups:] or [0.0] * repeats, device))
        # All ranks see the same numbers, so all of them leave here or none does.
        if relative_iqr(batches[-1]) <= _STEADY:
            break
    seconds = min(batches, key=relative_iqr)
    return {
        "op": op,
        "num_bytes": num_bytes,
        "time_us": statistics.median(seconds) * 1e6,
        "spread": round(relative_iqr(seconds), 5),
        "samples": repeats,
    }


def _agreed(op: str, times: list[float], device: torch.device) -> list[float]:
    """This rank's seconds made everyone's."""
    samples = torch.tensor(times, device=device, dtype=torch.float64)
    if op == "all_reduce":
        # The last rank to arrive does not wait: the shortest is the transfer, the rest is skew.
        dist.all_reduce(samples, op=dist.ReduceOp.MIN)
    else:
        samples /= 2  # there and back
        dist.broadcast(samples, src=0)
    return [float(value) for value in samples.tolist()]


def _ping_pong(tensor: torch.Tensor, rank: int) -> None:
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def _timed_region(call: Callable[[], object], device: torch.device, times: list[float]) -> None:
    """Append the seconds that ``call`` takes: on a CPU by the wall; on a GPU by events around
    several in a row."""
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
        return
    start, end = cuda_events()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call, unused-ignore]
    start.record()
    for _ in range(_IN_A_ROW):
        call()
    end.record()
    torch.cuda.synchronize(device)
    times.append(float(start.elapsed_time(end)) * 1e-3 / _IN_A_ROW)


if __name__ == "__main__":
    main()
