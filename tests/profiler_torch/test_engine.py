"""The engine computes what it should: chunks or not, whatever the policy, the slot or the shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sarathi_sim.profiler.engine.rank import Stage
from sarathi_sim.profiler.engine.spec import EngineError, StageShape, Work
from sarathi_sim.profiler.facts.model import ModelSpec
from tests.patience import PATIENCE_S
from tests.profiler_torch.local_engine import LocalEngine, poison
from tests.profiler_torch.small import GQA, MAX_LENGTH, MHA, PLAIN, requests, settings
from tests.simulator.oracle import POLICIES

CPU = torch.device("cpu")
TIED = replace(PLAIN, tied_embeddings=True)
MODELS = pytest.mark.parametrize("model", [MHA, GQA, TIED], ids=["mha", "gqa", "plain"])
#: Largest difference in fp32 between two orders of summation; logits are of order 1 to 10.
FP32 = 2e-5


def stage(model: ModelSpec, slots: int = 4, dtype: torch.dtype = torch.float32) -> Stage:
    shape = StageShape(model, 0, model.num_layers, 1, 0, slots, MAX_LENGTH)
    return Stage(shape, CPU, dtype)


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(96, size=count).astype(np.int32)


def chunk(tokens: np.ndarray, first: int, count: int, slot: int = 0) -> Work:
    ends = int(first + count == len(tokens))
    return Work(0, ((slot, count, first, ends),), (), tokens[first : first + count])


def prefill(engine: Stage, tokens: np.ndarray, sizes: tuple[int, ...], slot: int) -> torch.Tensor:
    """Logits after the prompt, processed in chunks of ``sizes``."""
    first = 0
    for size in sizes:
        logits = engine.run(chunk(tokens, first, size, slot))
        first += size
    assert first == len(tokens)
    return logits


@MODELS
@pytest.mark.parametrize("sizes", [(16,) * 4, (7,) * 9 + (1,), (1, 62, 1), (63, 1)])
def test_chunked_prefill_equals_full_prefill(model: ModelSpec, sizes: tuple[int, ...]) -> None:
    engine, tokens = stage(model), ids(64)
    whole = prefill(engine, tokens, (64,), slot=1)
    poison(engine, 2)
    chunked = prefill(engine, tokens, sizes, slot=2)
    assert whole.shape == (1, 96)
    assert (whole - chunked).abs().max() < FP32
    assert whole.std() > 0.1  # of zeros everything would be true


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.1), (torch.float16, 0.0125)])
def test_half_precision_is_as_exact_as_its_rounding(dtype: torch.dtype, bound: float) -> None:
    """bf16 has 8 bits: each of the ~20 roundings on the way is off by up to 2^-9 of its value.

    fp16 has 11, so its bound is an eighth of that.
    """
    engine, tokens = stage(MHA, dtype=dtype), ids(64)
    whole, chunked = (prefill(engine, tokens, s, 1) for s in ((64,), (7,) * 9 + (1,)))
    assert (whole - chunked).abs().max() < bound
    assert (whole - chunked).abs().max() > 0  # it is another order of summation


@MODELS
def test_decodes_of_any_length_and_slot_equal_full_prefill(model: ModelSpec) -> None:
    """A batch that mixes a chunk with decodes of three lengths, in slots out of order."""
    engine = stage(model)
    prompts = {3: ids(40, 1), 0: ids(9, 2), 2: ids(77, 3)}
    for slot in range(4):
        poison(engine, slot)
    for slot, tokens in prompts.items():
        engine.run(Work(0, ((slot, len(tokens) - 1, 0, 0),), (), tokens[:-1]))
    new = ids(33, 4)
    rows = np.concatenate([new, [tokens[-1] for tokens in prompts.values()]]).astype(np.int32)
    decodes = tuple((slot, len(tokens) - 1) for slot, tokens in prompts.items())
    mixed = engine.run(Work(1, ((1, 33, 0, 1),), decodes, rows))
    assert mixed.shape == (4, 96)
    for row, tokens in zip(mixed, [new, *prompts.values()], strict=True):
        alone = prefill(engine, tokens, (len(tokens),), slot=0)[0]
        assert (row - alone).abs().max() < FP32


@MODELS
def test_every_policy_yields_the_same_tokens(model: ModelSpec) -> None:
    """Also the tokens that each request has alone. Freed slots are overwritten all the time."""
    load = requests(14, 5)
    alone = LocalEngine(model, slots=1, max_length=MAX_LENGTH)
    expected = {}
    for request in load:
        expected |= alone.serve([request], POLICIES["orca_best"], settings(max_batch=1)).outputs
    assert {i: len(tokens) for i, tokens in expected.items()} == {
        r.id: r.output_tokens for r in load
    }
    engine = LocalEngine(model, slots=4, max_length=MAX_LENGTH)
    for policy in POLICIES.keys() - {"sarathi_equal_time"}:  # that one needs predicted times
        run = engine.serve(load, POLICIES[policy], settings())
        # Only a lead of the best logit above the rounding makes tokens comparable.
        assert run.margin > 2 * FP32
        assert run.outputs == expected, policy


def test_what_a_policy_decides_is_what_the_engine_executes() -> None:
    works: list[Work] = []

    class Spy(LocalEngine):
        def submit(self, work: Work) -> None:
            works.append(work)
            super().submit(work)

    run = Spy(MHA, slots=4, max_length=MAX_LENGTH).serve(
        requests(14, 5), POLICIES["sarathi_fill"], settings()
    )
    assert len(works) == len(run.decisions)
    for work, decision in zip(works, run.decisions, strict=True):
        assert [list(c[1:3]) for c in work.chunks] == [c[1:] for c in decision.chunks]
        assert sum(context for _, context in work.decodes) == decision.decode_context
        assert work.num_tokens == sum(c[1] for c in decision.chunks) + len(decision.decodes)
        assert decision.returned_s >= decision.clock_s
    assert any(work.chunks and work.decodes for work in works)


def test_more_sequences_than_slots_is_refused() -> None:
    engine = LocalEngine(MHA, slots=2, max_length=MAX_LENGTH)
    with pytest.raises(EngineError, match="all 2 KV slots are taken"):
        engine.serve(requests(14, 5), POLICIES["orca_unconstrained"], settings(max_batch=3))


def test_a_work_survives_its_encoding() -> None:
    work = Work(7, ((1, 3, 0, 0), (2, 1, 9, 1)), ((0, 11), (3, 5)), ids(6))
    back = Work.decode(work.encode())
    assert (back.index, back.chunks, back.decodes) == (7, work.chunks, work.decodes)
    assert back.tokens.tolist() == work.tokens.tolist()


def shard_logits(model: ModelSpec, tp: int, cuts: tuple[int, ...]) -> torch.Tensor:
    """Logits of one prompt on shards that run one after the other, their sums taken by hand."""
    tokens = ids(20)
    work = chunk(tokens, 0, 20)
    edges = (0, *cuts, model.num_layers)
    x = None
    for first, last in pairwise(edges):
        shards = [
            Stage(StageShape(model, first, last, tp, rank, 1, MAX_LENGTH), CPU, torch.float32)
            for rank in range(tp)
        ]
        x = lockstep(shards, work, x)
    return x


def lockstep(shards: list[Stage], work: Work, x: torch.Tensor | None) -> torch.Tensor:
    """Run TP shards in threads that meet at every reduction."""
    import threading

    barrier = threading.Barrier(len(shards), timeout=PATIENCE_S)
    parts: list[torch.Tensor | None] = [None] * len(shards)
    results: list[torch.Tensor | None] = [None] * len(shards)

    def reducer(rank: int) -> Callable[[torch.Tensor], None]:
        def reduce(tensor: torch.Tensor) -> None:
            parts[rank] = tensor.clone()
            barrier.wait()
            total = sum(parts)  # type: ignore[arg-type]
            barrier.wait()
            tensor.copy_(total)

        return reduce

    def run(rank: int) -> None:
        shards[rank].layer.reduce = reducer(rank)
        results[rank] = shards[rank].run(work, None if x is None else x.clone())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    if shards[0].shape.is_last:
        return torch.cat(results, dim=-1)  # type: ignore[arg-type]
    return results[0]  # type: ignore[return-value]


@MODELS
@pytest.mark.parametrize(("tp", "cuts"), [(2, ()), (4, ()), (1, (1,)), (2, (1, 2))])
def test_shards_compute_the_whole(model: ModelSpec, tp: int, cuts: tuple[int, ...]) -> None:
    """GQA with tp 4 has more ranks than KV heads; a vocabulary of 96 leaves ranks without rows."""
    whole = shard_logits(model, 1, ())
    split = shard_logits(model, tp, cuts)
    assert split.shape == whole.shape
    assert (split - whole).abs().max() < FP32
