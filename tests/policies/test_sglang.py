"""SGLang's scheduler on schedules worked out by hand from its source."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_sim.policies.sglang import Sglang
from tests.policies.by_hand import chunks, decodes, request, schedule


def sglang(**keys: Any) -> Sglang:
    return Sglang(disable_overlap_schedule=True, **keys)


def test_prompts_go_first_and_decodes_wait() -> None:
    arrivals = {0: [request(0, 4, 3)], 1: [request(1, 8, 2)]}
    steps = schedule(sglang(), arrivals, blocks=100)
    assert chunks(steps) == [[(0, 4)], [(1, 8)], [], []]
    assert decodes(steps) == [[], [], [0, 1], [0]]


def test_new_requests_are_looked_for_every_so_many_decodes() -> None:
    """Request 1 comes after the look that follows a prefill batch, and waits for the third decode.
    Request 2 comes during its prefill, after which is a look at once."""
    arrivals = {0: [request(0, 4, 9)], 2: [request(1, 8, 2)], 4: [request(2, 4, 2)]}
    steps = schedule(sglang(scheduler_recv_interval=3), arrivals, blocks=100)
    assert chunks(steps)[:6] == [[(0, 4)], [], [], [], [(1, 8), (2, 4)], []]
    with pytest.raises(ValueError, match="scheduler_recv_interval must be at least 1, not 0"):
        sglang(scheduler_recv_interval=0)


def test_mixed_chunks_let_decodes_join() -> None:
    arrivals = {0: [request(0, 4, 3)], 1: [request(1, 8, 2)]}
    steps = schedule(sglang(enable_mixed_chunk=True), arrivals, blocks=100)
    assert chunks(steps) == [[(0, 4)], [(1, 8)], []]
    assert decodes(steps) == [[], [0], [0, 1]]


def test_mixed_decodes_count_against_the_chunk() -> None:
    """Pages of 1 token: beside one decode a chunk of 8 has room for 7 tokens."""
    arrivals = {0: [request(0, 4, 3)], 1: [request(1, 9, 1)]}
    mixed = sglang(enable_mixed_chunk=True, chunked_prefill_size=8)
    steps = schedule(mixed, arrivals, blocks=100, block_size=1)
    assert chunks(steps) == [[(0, 4)], [(1, 7)], [(1, 2)]]


def test_prompts_are_counted_in_pages_and_the_last_one_is_cut() -> None:
    """Chunks of 8 tokens in pages of 4."""
    arrivals = {0: [request(0, 10, 1), request(1, 7, 1), request(2, 3, 1)]}
    steps = schedule(sglang(chunked_prefill_size=8), arrivals, blocks=100)
    # 0: request 0 has 3 pages, 2 fit.
    # 1: its last 2 tokens count as a page; of request 1's two pages one fits.
    # 2: its last 3 tokens, a page; request 2's page fits.
    assert chunks(steps) == [[(0, 8)], [(0, 2), (1, 4)], [(1, 3), (2, 3)]]


def test_without_chunks_the_first_prompt_may_be_of_any_length() -> None:
    """10 tokens: 8 and then 6, in pages of 4: 8 + 8 is too much. 30 is not, alone."""
    whole = sglang(chunked_prefill_size=None, max_prefill_tokens=10)
    arrivals = {0: [request(0, 8, 1), request(1, 6, 1), request(2, 30, 1)]}
    steps = schedule(whole, arrivals, blocks=100)
    assert chunks(steps) == [[(0, 8)], [(1, 6)], [(2, 30)]]


@pytest.mark.parametrize(("prompt", "at_once"), [(14, True), (15, False)])
def test_admission_expects_a_share_of_what_may_be_generated(prompt: int, at_once: bool) -> None:
    """100 pages of one token. Request 0: 20 tokens, at most 50 more, of which it has one.

    It holds 20 pages and is expected to take 0.7 x 49 = 34.3 more, which leaves 45.7. Request 1
    may come to its prompt + 30, + 1 page, which must be less: 45 is, 46 is not.
    """
    arrivals = {0: [request(0, 20, 50)], 1: [request(1, prompt, 30)]}
    steps = schedule(sglang(), arrivals, blocks=100, block_size=1)
    starts = [number for number, step in enumerate(steps) if (1, prompt) in step.chunks]
    # Else it is not looked at again until request 0, which needs 50 iterations, has left.
    assert starts == [1 if at_once else 50]


@pytest.mark.parametrize(("prompt", "at_once"), [(12, True), (13, False)])
def test_the_share_falls_with_every_decode(prompt: int, at_once: bool) -> None:
    """As above, but request 1 comes after 10 decodes.

    The ratio fell by 10 x (0.7 - 0.098) / 600 to 0.68997, so that request 0, with 11 of its 50
    tokens, is expected to take 26.91 of the 70 free pages more: 43.09 are left, and 12 + 30 + 1 is
    less. (With 0.7, 42.7 would be left.)
    """
    arrivals = {0: [request(0, 20, 50)], 11: [request(1, prompt, 30)]}
    steps = schedule(sglang(), arrivals, blocks=100, block_size=1)
    starts = [number for number, step in enumerate(steps) if (1, prompt) in step.chunks]
    assert starts == [11 if at_once else 50]


def test_the_share_starts_anew_after_everybody_has_left() -> None:
    """After request 9 has decoded 10 times, 14 tokens fit beside a fresh request 0 and 15 do not,
    as in the first test: the ratio is 0.7 again."""
    for prompt, at_once in ((14, True), (15, False)):
        arrivals = {
            0: [request(9, 1, 11)],
            11: [request(0, 20, 50)],
            12: [request(1, prompt, 30)],
        }
        steps = schedule(sglang(), arrivals, blocks=100, block_size=1)
        starts = [number for number, step in enumerate(steps) if (1, prompt) in step.chunks]
        assert starts == [12 if at_once else 61]


def test_conservativeness_scales_the_share_up_to_one() -> None:
    """With 10 x 0.7 > 1 request 0 is expected to take all its 49: 31 are left, 30 fit in."""
    for prompt, start in ((0, 50), (-1, 1)):
        arrivals = {0: [request(0, 20, 50)], 1: [request(1, 15 + prompt, 15)]}
        policy = sglang(schedule_conservativeness=10.0)
        steps = schedule(policy, arrivals, blocks=100, block_size=1)
        assert (1, 15 + prompt) in steps[start].chunks


def test_who_has_generated_least_is_retracted_and_waits_behind_all_others() -> None:
    """20 pages of one token, and nobody is expected to generate anything (a ratio of 0)."""
    arrivals = {
        0: [request(0, 6, 10)],
        1: [request(1, 3, 6)],
        2: [request(2, 2, 6)],
        5: [request(3, 12, 2)],
    }
    steps = schedule(sglang(schedule_conservativeness=0.0), arrivals, blocks=20, block_size=1)
    # 0 to 2: the prompts, 11 pages. 3, 4, 5: three decodes each, and none is left. (Request 3 may
    #    come to 15 tokens, which is more than the 3 pages free at 5.)
    # 6: they need 3. All have 4 tokens; the longest prompt goes: request 0 frees its 9 pages.
    #    Now the ratio is (4 + 4 + 20 x 2) / (6 + 6 + 1), at most 1.
    # 7: 7 are free, of which the two may take 1 each: request 3 does not fit, nor is request 0
    #    looked at, behind it. The two decode for the last time.
    # 8: request 3; request 0 may come to 17 more, and has to wait. 9: request 3's last decode.
    # 10: request 0 computes 6 + 4 tokens again, which yields its fifth. 11 to 15: the rest.
    assert [step.preempted for step in steps] == [[0] if at == 6 else [] for at in range(16)]
    assert [step.free for step in steps[:8]] == [14, 11, 9, 6, 3, 0, 7, 5]
    assert chunks(steps)[:3] == [[(0, 6)], [(1, 3)], [(2, 2)]]
    assert chunks(steps)[3:] == [[]] * 5 + [[(3, 12)], [], [(0, 10)]] + [[]] * 5
    both = [[0, 1, 2]] * 3 + [[1, 2]] * 2
    assert decodes(steps)[3:] == [*both, [], [3], [], *[[0]] * 5]


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ({"schedule_policy": "fcfs"}, [(1, 20), (2, 1)]),
        ({"schedule_policy": "lpm"}, [(2, 1), (1, 20)]),
        ({"schedule_policy": "lof"}, [(2, 1), (1, 20)]),
    ],
)
def test_the_order_of_the_queue(keys: dict[str, Any], order: list[tuple[int, int]]) -> None:
    """Request 2 finds two pages of its prompt cached, and may generate more than request 1."""
    shared = (("system", 8),)
    arrivals = {
        0: [request(0, 9, 1, prefix=shared)],
        1: [request(1, 20, 1), request(2, 9, 1, 2, prefix=shared)],
    }
    steps = schedule(sglang(**keys), arrivals, blocks=100, caching=True)
    assert chunks(steps) == [[(0, 9)], order]


def test_a_prefix_is_found_when_it_has_been_computed() -> None:
    """Pages of one token. Requests 0 and 1 come together, and both compute the 32 tokens that they
    share: 80 pages. Then request 1 gives its copy back: 48 are taken. Request 2 finds them, and has
    left before the last step: then 48 are held, and two tokens of either of the others."""
    shared = (("system", 32),)
    both = [request(0, 40, 3, prefix=shared), request(1, 40, 3, prefix=shared)]
    arrivals = {0: both, 1: [request(2, 40, 2, prefix=shared)]}
    steps = schedule(sglang(), arrivals, blocks=1000, block_size=1, caching=True)
    assert chunks(steps) == [[(0, 40), (1, 40)], [(2, 8)], [], []]
    assert [step.free for step in steps] == [920, 944, 941, 948]


def test_decodes_wait_although_the_memory_is_used_up() -> None:
    """10 pages of 4 tokens, and nobody is expected to generate anything (a ratio of 0).

    36 tokens are free beside request 0. Request 1 needs fewer, 5 + 25 + a page. Counted in pages it
    leaves none: nobody else is admitted before somebody has left, and this is a prefill batch.
    """
    arrivals = {0: [request(0, 4, 3)], 1: [request(1, 5, 2, 25), request(2, 1, 1)]}
    steps = schedule(sglang(schedule_conservativeness=0.0), arrivals, blocks=10)
    assert chunks(steps) == [[(0, 4)], [(1, 5)], [], [(2, 1)], []]
    assert decodes(steps) == [[], [], [0, 1], [], [0]]


@pytest.mark.parametrize(
    ("caching", "prompt", "at_once"),
    [(True, 14, True), (True, 15, False), (False, 30, True), (False, 31, False)],
)
def test_a_length_that_is_known_is_expected(caching: bool, prompt: int, at_once: bool) -> None:
    """100 pages of one token. Request 0 holds 20 and takes 49 more, for certain: 31 are left.

    With the radix cache, request 1 must need fewer: its prompt, 15 tokens and a page. Without it,
    the engine sees that request 1 ends first and gives its memory back, so that only its prompt and
    a page must be there now.
    """
    arrivals = {0: [request(0, 20, 50)], 1: [request(1, prompt, 15)]}
    policy = sglang(ignore_eos=True)
    steps = schedule(policy, arrivals, blocks=100, block_size=1, caching=caching)
    starts = [number for number, step in enumerate(steps) if (1, prompt) in step.chunks]
    assert starts == [1 if at_once else 50]


def test_with_overlap_a_retracted_request_loses_the_token_on_its_way() -> None:
    """20 pages of one token, and nobody is expected to generate anything (a ratio of 0).

    The prompts take 7, six decodes 12. For the seventh there is one page: both have 6 tokens (and
    one on its way), the longer prompt goes. Request 0 goes on to its twelfth token. When that is
    booked, request 1 computes its 4 + 6 tokens again.
    """
    arrivals = {0: [request(0, 3, 12)], 1: [request(1, 4, 11)]}
    policy = Sglang(schedule_conservativeness=0.0)
    steps = schedule(policy, arrivals, blocks=20, block_size=1, in_flight=2)
    assert [step.preempted for step in steps[:9]] == [*[[]] * 8, [1]]
    assert chunks(steps)[:15] == [[(0, 3)], [(1, 4)], *[[]] * 12, [(1, 10)]]
    assert decodes(steps)[:15] == [[], [], *[[0, 1]] * 6, *[[0]] * 5, [], []]


def test_max_running_requests() -> None:
    arrivals = {0: [request(id, 2, 2) for id in range(3)]}
    steps = schedule(sglang(max_running_requests=2), arrivals, blocks=100)
    assert chunks(steps) == [[(0, 2), (1, 2)], [], [(2, 2)], []]


def test_overlap_forms_a_decode_before_the_token_is_there() -> None:
    steps = schedule(Sglang(), {0: [request(0, 4, 3)]}, blocks=100, in_flight=2)
    # Two in flight: the prompt and the first decode. After two decodes all tokens are scheduled.
    assert chunks(steps) == [[(0, 4)], [], [], []]
    assert decodes(steps) == [[], [0], [0], []]


@pytest.mark.parametrize(
    "keys",
    [{"chunked_prefill_size": 0}, {"max_prefill_tokens": 0}, {"max_running_requests": 0}],
)
def test_settings_that_make_no_sense_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Sglang(**keys)
