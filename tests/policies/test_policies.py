"""Policies on views written out by hand, the scheduler's books step by step, and the catalogue."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.config.policy import POLICIES
from sarathi_sim.policies import catalogue
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.fair import Fair
from sarathi_sim.policies.kv import CachedBlocks
from sarathi_sim.policies.log import DECODE, PADDING, PREFILL, PolicyError
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca, OrcaWorstCase, RequestLevel
from sarathi_sim.policies.policy import Longest, Plan, Policy, View, named
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.policies.sarathi_serve import SarathiServe
from sarathi_sim.policies.sglang import Sglang
from sarathi_sim.policies.trtllm import Trtllm
from tests.experiments.small_config import AT_MOST

DYNAMIC = {"enable_dynamic_chunking_schedule": True}
BALANCE = {"disable_overlap_scheduler": True, "enable_balance": True}
ONE = {"id": 3, "arrival_s": 0.0, "prompt_tokens": 4, "output_tokens": 6, "max_tokens": 5}


def waiting(*prompts: int, kv: int = 10) -> deque[Sequence]:
    return deque(Sequence(i, prompt, 50, kv) for i, prompt in enumerate(prompts))


def view(
    queue: deque[Sequence],
    *,
    decodes: int = 0,
    prefilling: tuple[Sequence, ...] = (),
    max_batch: int = 4,
    free_kv: int = 1000,
) -> View:
    decoding = {Sequence(100 + i, 5, 50, 10): None for i in range(decodes)}
    seen = View(queue, list(prefilling), decoding.keys(), max_batch)
    seen.num_decodes = decodes
    seen.free_slots = max_batch - decodes - len(prefilling)
    seen.free_kv = free_kv
    return seen


def chunks(plan: object) -> list[tuple[int, int]] | None:
    return None if plan is None else [(s.id, n) for s, n in plan.chunks]  # type: ignore[attr-defined]


def test_orca_best_case_admits_one_whole_prompt() -> None:
    orca = Orca(max_prefills=1)
    assert chunks(orca.plan(view(waiting(7, 8), decodes=2))) == [(0, 7)]
    assert chunks(orca.plan(view(waiting(7, 8), decodes=4))) == []  # no slot: decodes only
    assert chunks(orca.plan(view(waiting(7), decodes=1, free_kv=9))) == []  # no KV
    assert orca.plan(view(waiting(7), free_kv=9)) is None
    assert orca.plan(view(waiting())) is None


def test_orca_unconstrained_admits_all_that_fit() -> None:
    assert chunks(Orca().plan(view(waiting(7, 8, 9, 6, 5), decodes=1))) == [(0, 7), (1, 8), (2, 9)]
    assert chunks(Orca().plan(view(waiting(7, 8, 9), free_kv=25))) == [(0, 7), (1, 8)]
    assert chunks(Orca(max_prefills=2).plan(view(waiting(7, 8, 9)))) == [(0, 7), (1, 8)]


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    queue = waiting(7, 8)
    queue[0].kv_tokens = 500
    for policy in (Orca(), Orca(max_prefills=1), OrcaWorstCase(), RequestLevel(), Sarathi()):
        assert policy.plan(view(queue, free_kv=100)) is None


@pytest.mark.parametrize("policy", [OrcaWorstCase(), RequestLevel()])
def test_requests_begin_together(policy: OrcaWorstCase) -> None:
    assert chunks(policy.plan(view(waiting(7, 8, 9, 6, 5)))) == [(0, 7), (1, 8), (2, 9), (3, 6)]
    assert chunks(policy.plan(view(waiting(7), decodes=1))) == []
    assert policy.plan(view(waiting())) is None
    assert policy.holds_finished == isinstance(policy, RequestLevel)


def test_sarathi_sends_one_chunk_and_cuts_it_to_the_tile() -> None:
    sarathi = Sarathi(chunk_size=256, tile=128)
    assert chunks(sarathi.plan(view(waiting(1000, 1000), max_batch=27))) == [(0, 256)]
    assert chunks(sarathi.plan(view(waiting(1000), decodes=26, max_batch=27))) == [(0, 230)]
    begun = Sequence(9, 1000, 50, 10)
    begun.prefilled = 900
    # The one that has begun goes first, and its last chunk is what is left of it.
    both = view(waiting(1000), decodes=3, prefilling=(begun,), max_batch=27)
    assert chunks(sarathi.plan(both)) == [(9, 100)]
    assert chunks(sarathi.plan(view(waiting(1000), decodes=27, max_batch=27))) == []
    assert sarathi.plan(view(waiting())) is None


def test_sarathi_chunk_rules() -> None:
    """Section 4.4: with C = 256, tile 128 and batch B the chunk is 256 - (B - 1)."""
    assert Sarathi(256, 128, "reserve").chunk_tokens(decodes=3, max_batch=18) == 256 - 17
    assert Sarathi(256, 128, "fill").chunk_tokens(decodes=3, max_batch=18) == 253
    assert Sarathi(256, 128, "fixed").chunk_tokens(decodes=3, max_batch=18) == 256
    # 320 is not a multiple of the tile: the fused rows are cut to 256.
    assert Sarathi(320, 128, "fill").chunk_tokens(decodes=20, max_batch=21) == 236
    assert Sarathi(320, 1, "fill").chunk_tokens(decodes=20, max_batch=21) == 300
    assert Sarathi(64, 128, "fill").chunk_tokens(decodes=20, max_batch=21) == 44


@given(
    st.integers(1, 600),
    st.integers(1, 256),
    st.integers(0, 700),
    st.sampled_from(["fill", "reserve"]),
)
def test_sarathi_always_makes_progress(chunk: int, tile: int, decodes: int, rule: str) -> None:
    tokens = Sarathi(chunk, tile, rule).chunk_tokens(decodes, max_batch=decodes + 1)  # type: ignore[arg-type]
    assert tokens >= 1
    if chunk >= tile or decodes >= chunk:
        assert (tokens + decodes) % tile == 0


def test_equal_time_takes_the_largest_chunk_in_time() -> None:
    """A token costs 1 s, a cached token 0.01 s, a decode 2 s. Tiles of 4; at most 32 rows."""

    def costing(decodes: int, sequence: Sequence) -> View:
        seen = view(deque(), decodes=decodes, prefilling=(sequence,), max_batch=100)
        seen.cost = lambda each, tokens: tokens + 0.01 * each.prefilled + 2 * decodes
        return seen

    sarathi = Sarathi(chunk_size=32, tile=4, chunk_rule="equal_time", iteration_s=20.0)
    sequence = Sequence(0, 5000, 10, 10)
    # No decodes: 20 tokens take 20 s. After 100 tokens 19 would, of which 16 are whole tiles.
    # After 1,700 tokens, which take 17 s, not even a tile fits: one goes all the same.
    # Two decodes take 4 s: 16 would fit, and with them 14 + 2 rows are whole tiles.
    for decodes, done, tokens in ((0, 0, 20), (0, 100, 16), (0, 1700, 4), (2, 0, 14)):
        sequence.prefilled = done
        assert chunks(sarathi.plan(costing(decodes, sequence))) == [(0, tokens)]
    sequence.prefilled = 4997  # what is left of the prompt, although it takes longer
    assert chunks(sarathi.plan(costing(0, sequence))) == [(0, 3)]
    # With all the time in the world it is `fill`.
    patient = Sarathi(chunk_size=32, tile=4, chunk_rule="equal_time", iteration_s=1e6)
    sequence.prefilled = 0
    for decodes in (0, 3, 33):
        found = patient.plan(costing(decodes, sequence))
        assert chunks(found) == chunks(Sarathi(32, 4).plan(costing(decodes, sequence)))
    with pytest.raises(ValueError, match="only the simulator predicts"):
        sarathi.plan(view(waiting(7)))


@pytest.mark.parametrize(
    ("kind", "message", "refused"),
    [
        (Sarathi, "at least 1", [{"chunk_size": 0}, {"tile": -1}]),
        (Sarathi, "fill, reserve, fixed or equal_time", [{"chunk_rule": "most"}]),
        (Sarathi, "iteration_s must be", [{"chunk_rule": "equal_time"}, {"iteration_s": 0.1}]),
        (Sarathi, "iteration_s must be", [{"chunk_rule": "equal_time", "iteration_s": 0.0}]),
        (Orca, "at least 1", [{"max_prefills": 0}]),
        (Fair, "at least 1", [{"max_num_batched_tokens": 0}]),
        (SarathiServe, "must be", [{"chunk_size": 0}, {"max_num_seqs": 0}]),
        (SarathiServe, "must be", [DYNAMIC | {"low_chunk_size": 40}]),
        (SarathiServe, "must be", [DYNAMIC | {"low_chunk_size": 64, "high_chunk_size": 32}]),
        (Sglang, "must be at least 1", [{"chunked_prefill_size": 0}, {"max_prefill_tokens": 0}]),
        (Sglang, "must be at least 1, not 0", [{"max_running_requests": 0}]),
        (Sglang, "scheduler_recv_interval must be at least 1", [{"scheduler_recv_interval": 0}]),
        (Trtllm, "must", [{"max_num_tokens": 0}, {"max_batch_size": 0}]),
        (Trtllm, "must", [{"batch_wait_max_tokens_ratio": 1.5}]),
        (
            Trtllm,
            "timeout_iters must be at least 1",
            [BALANCE | {"timeout_iters": n} for n in (0, -1)],
        ),
        (Request, "at least 1", [ONE | {"prompt_tokens": 0}, ONE | {"output_tokens": 0}]),
        (Request, "request 3: generates 6 tokens but declares at most 5", [ONE]),
    ],
)
def test_nonsense_is_refused(kind: type, message: str, refused: list[dict[str, object]]) -> None:
    for keys in refused:
        with pytest.raises(ValueError, match=message):
            kind(**keys)


# The scheduler's books, step by step, and the plans it refuses


def scheduler(policy: Policy, **options: object) -> MicroBatches:
    settings = {"max_batch": 2, "max_in_flight": 1, "kv_capacity": 100, "max_length": 20}
    return MicroBatches(policy, **(settings | options))  # type: ignore[arg-type]


def request(id: int, prompt: int, output: int) -> Request:
    return Request(id, 0.0, prompt, output, 20 - prompt)


def shape(batch: Batch | None) -> tuple[list[tuple[int, int, int]], int, int, int]:
    assert batch is not None
    chunks = [(s.id, n, context) for s, n, context in batch.chunks]
    return chunks, batch.num_decodes, batch.decode_context, batch.padding


def drain(books: MicroBatches) -> list[tuple[list[tuple[int, int, int]], int, int, int]]:
    shapes = []
    while (batch := books.next_batch()) is not None:
        shapes.append(shape(batch))
        books.complete(batch)
    return shapes


def spans(books: MicroBatches) -> list[tuple[int, ...]]:
    return [tuple(books.spans[i : i + 5]) for i in range(0, len(books.spans), 5)]


def test_a_request_takes_one_decode_less_than_it_outputs() -> None:
    books = scheduler(Sarathi(chunk_size=4, tile=1))
    books.add(request(0, 6, 3))
    # Chunks of 4 and 2; then two decodes that find 6 and 7 tokens in the cache.
    assert drain(books) == [
        ([(0, 4, 0)], 0, 0, 0),
        ([(0, 2, 4)], 0, 0, 0),
        ([], 1, 6, 0),
        ([], 1, 7, 0),
    ]
    assert spans(books) == [(0, PREFILL, 0, 0, 1), (0, DECODE, 0, 2, 3)]
    assert books.blocks.free == 100
    assert books.num_unfinished == 0


def test_finished_members_stay_as_padding() -> None:
    books = scheduler(RequestLevel())
    for each in (request(0, 4, 1), request(1, 5, 3), request(2, 3, 1)):
        books.add(each)
    assert drain(books) == [
        ([(0, 4, 0), (1, 5, 0)], 0, 0, 0),
        ([], 2, 9, 1),  # 0 is done, but computes on against its 4 tokens
        ([], 2, 10, 1),
        ([(2, 3, 0)], 0, 0, 0),
    ]
    assert spans(books) == [
        (0, PREFILL, 0, 0, 0),
        (1, PREFILL, 0, 0, 0),
        (1, DECODE, 0, 1, 2),
        (0, PADDING, 0, 1, 2),
        (2, PREFILL, 0, 3, 3),
    ]


class Scripted:
    holds_finished = False

    def __init__(self, *plans: Callable[[View], Plan | None]) -> None:
        self.plans = list(plans)

    def plan(self, view: View) -> Plan | None:
        return self.plans.pop(0)(view) if self.plans else None


def test_a_skipped_decode_waits_and_loses_nothing() -> None:
    def both(view: View) -> Plan:
        return Plan(tuple((s, s.prompt_tokens) for s in view.waiting))

    def skip_first(view: View) -> Plan:
        return Plan(skip=(next(iter(view.decoding)),))

    def all_run(view: View) -> Plan:
        return Plan()

    books = scheduler(Scripted(both, skip_first, skip_first, all_run, all_run))
    books.add(request(0, 4, 3))
    books.add(request(1, 5, 4))
    assert drain(books) == [
        ([(0, 4, 0), (1, 5, 0)], 0, 0, 0),
        ([], 1, 5, 0),
        ([], 1, 6, 0),
        ([], 2, 4 + 7, 0),  # request 1 is done after this one
        ([], 1, 5, 0),
    ]
    assert spans(books) == [
        (0, PREFILL, 0, 0, 0),
        (1, PREFILL, 0, 0, 0),
        (1, DECODE, 0, 1, 3),
        (0, DECODE, 0, 3, 4),
    ]


def test_the_free_pool_fills_a_micro_batch_from_others_that_are_back() -> None:
    books = scheduler(Orca(max_prefills=1), max_batch=3, max_in_flight=2, free_pool=True)
    for i in range(2):
        books.add(request(i, 4, 4))
    first, second = books.next_batch(), books.next_batch()
    assert first and second
    books.complete(first)
    books.complete(second)
    # Both are back when the next batch is formed: it takes in the other one's member.
    merged = books.next_batch()
    assert shape(merged) == ([], 2, 8, 0)
    assert books.next_batch() is None
    assert merged
    assert [s.id for s in merged.decodes] == [0, 1]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda view: Plan(((view.waiting[0], 5),)), "chunk of 5 tokens does not fit"),
        (lambda view: Plan(((view.waiting[0], 0),)), "chunk of 0 tokens does not fit"),
        (lambda view: Plan(tuple((s, 4) for s in view.waiting)), "without a free slot"),
        (lambda view: Plan(), "the plan is empty"),
        (lambda view: Plan(skip=(view.waiting[0],)), "does not decode"),
        (lambda view: Plan(skip=(view.waiting[0],) * 2), "skips a sequence twice"),
        (lambda view: Plan(((view.waiting[0], 2),) * 2), "two chunks of"),
        (lambda view: Plan(((Sequence(9, 4, 4, 4), 2),)), "neither waiting nor a member"),
    ],
)
def test_impossible_plans_are_refused(plan: Callable[[View], Plan | None], message: str) -> None:
    books = scheduler(Scripted(plan))
    for i in range(3):
        books.add(request(i, 4, 2))
    with pytest.raises(PolicyError, match=message):
        books.next_batch()


def test_settings_are_checked() -> None:
    for name in ("max_batch", "max_in_flight", "kv_capacity", "max_length"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            scheduler(Orca(), **{name: 0})
    with pytest.raises(ValueError, match="bound"):  # padding needs bound micro-batches
        scheduler(RequestLevel(), free_pool=True)


def test_requests_that_can_never_fit_are_rejected_with_a_reason() -> None:
    books = scheduler(Orca(), kv_capacity=15, reserve_declared=True)
    assert books.add(Request(0, 0.0, 10, 2, 4)) is None
    reason = books.add(Request(1, 0.0, 10, 2, 8))
    assert reason == "reserves 18 KV tokens, but the replica holds 15"
    reason = books.add(Request(2, 0.0, 15, 2, 8))
    assert reason is not None and "needs 23 tokens" in reason and "max_length is 20" in reason


# A policy is one file: it is found by its name, with its arguments as keys


ROOT = Path(__file__).resolve().parents[2]


def test_the_shipped_policies_are_found() -> None:
    for name, keys, expected in (
        ("orca", {"case": "worst"}, OrcaWorstCase()),
        ("orca", {}, Orca(max_prefills=1)),
        ("orca", {"case": "unconstrained"}, Orca()),
        ("request_level", {}, RequestLevel()),
        ("sarathi", {"chunk_size": 64, "chunk_rule": "fixed"}, Sarathi(64, 128, "fixed")),
    ):
        found = catalogue.build(name, **keys)
        assert type(found) is type(expected) and vars(found) == vars(expected)
    fields = POLICIES["sarathi"].model_fields
    assert list(fields) == ["name", "chunk_size", "tile", "chunk_rule", "iteration_s"]
    assert fields["chunk_size"].default == 256


def test_a_class_gets_what_it_leaves_out() -> None:
    """With its mark, and where it is built; what it has stays."""
    plain: Any = type("Plain", (), {"plan": lambda *_: None, "version": "3"})
    marked: Any = named("marked")(type("Marked", (), {}))
    assert catalogue.complete(policy := plain()) is policy
    for kind in (plain, marked):
        assert (kind.pooled, kind.chunking, kind.cached_blocks) == (False, None, CachedBlocks)
        assert kind().refusal(Longest(1, 2, 3)) is None
    assert (plain.version, marked.version) == ("3", "")


@pytest.mark.slow
def test_a_new_file_is_all_it_takes(tmp_path: Path) -> None:
    """In a process of its own, with a folder of policies beside the shipped ones."""
    (tmp_path / "at_most.py").write_text(AT_MOST)
    code = (
        f"from sarathi_sim import policies; policies.__path__.append({str(tmp_path)!r})\n"
        "from sarathi_sim.experiments.run.experiment import simulate_all\n"
        "from sarathi_sim.experiments.config.loading import load_experiment\n"
        "e = load_experiment('first_experiment', ['workload.requests=30',\n"
        "    'scenarios.orca.policy={name: at_most, prompts: 2}'])\n"
        "print(vars(e.scenarios['orca'].policy.build()))\n"
        "print(simulate_all(e).runs['orca'].summary['finished'])\n"
        "load_experiment('first_experiment', ['scenarios.orca.policy={name: at_most}'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["{'prompts': 2, 'eager': True}", "30"]
    assert re.search(r"policy\.prompts: this key is missing", done.stderr), done.stderr


def test_two_policies_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(AT_MOST)
    from sarathi_sim import policies

    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    with pytest.raises(ValueError, match="two policies called 'at_most'"):
        catalogue.builders.__wrapped__()
    for name in ("one", "other"):
        sys.modules.pop(f"sarathi_sim.policies.{name}", None)
