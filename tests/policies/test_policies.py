"""What each policy plans, on views written out by hand."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.policies.orca import Orca, OrcaWorstCase
from sarathi_sim.policies.policy import View
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.request_level import RequestLevel
from sarathi_sim.policies.sarathi import Sarathi


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, "at least 1"),
        ({"tile": -1}, "at least 1"),
        ({"chunk_rule": "most"}, "fill, reserve, fixed or equal_time"),
    ],
)
def test_sarathi_refuses_nonsense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sarathi(**arguments)  # type: ignore[arg-type]


def test_orca_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Orca(max_prefills=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.0, 0, 1, 5), "at least 1"),
        ((0, 0.0, 4, 0, 5), "at least 1"),
        ((3, 0.0, 4, 6, 5), "request 3: generates 6 tokens but declares at most 5"),
    ],
)
def test_requests_are_checked(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(*arguments)  # type: ignore[arg-type]


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
    "keys",
    [
        {"chunk_rule": "equal_time"},
        {"iteration_s": 0.1},
        {"chunk_rule": "equal_time", "iteration_s": 0.0},
    ],
)
def test_equal_time_needs_a_time(keys: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="iteration_s must be"):
        Sarathi(**keys)  # type: ignore[arg-type]
