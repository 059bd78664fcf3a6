"""Surfaces of kernels: what they pass through, what cleaning does, how they are judged."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.kernels import attention_grid as grids
from sarathi_sim.profiler.kernels import gemm_lattice as gemms
from sarathi_sim.profiler.kernels.message_curves import ReduceCurve, fit_reduce
from sarathi_sim.profiler.physics.prompt_law import likeness

SIDES = [256, 512, 1024, 2048, 4096]
TOKENS = [1, 2, 4, 8, 16, 32, 64]


def law(m: float, n: float, k: float) -> float:
    """Log-linear in n and k, linear in m with a bend at 8."""
    return 1e-3 * n**0.9 * k**0.8 * (10 + max(m - 8, 0))


def gemm_rows() -> pd.DataFrame:
    rows = [(m, n, k, law(m, n, k)) for m in TOKENS for n in SIDES for k in SIDES]
    return pd.DataFrame(rows, columns=["m", "n", "k", "time_us"])


def test_a_shape_between_measured_ones_follows_the_law() -> None:
    lattice = gemms.fit_lattice(gemms.gemm_cube(gemm_rows()))
    m = np.array([1.0, 8.0, 24.0, 64.0, 128.0])
    for n, k in ((512, 1024), (700, 3000)):
        expected = [law(each, n, k) for each in m[:-1]]
        np.testing.assert_allclose(lattice.time_us(m, n, k)[:-1], expected, rtol=1e-9)
    # Beyond the tables: in proportion to m, and to n k.
    assert lattice.time_us(m, 512, 512)[-1] == pytest.approx(2 * law(64, 512, 512))
    assert lattice.time_us(m, 8192, 512)[1] == pytest.approx(2 * law(8, 4096, 512))
    assert lattice.time_us(m, 100, 512)[1] == pytest.approx(law(8, 256, 512))
    assert lattice.measured(512, 256) and not lattice.measured(700, 256)
    # What is stored is within a thousandth.
    stored, m = gemms.GemmLattice.from_arrays(lattice.arrays()), np.array(TOKENS, dtype=float)
    wanted = lattice.time_us(m, 700, 3000)
    np.testing.assert_allclose(stored.time_us(m, 700, 3000), wanted, rtol=1e-3)
    assert {array.dtype.name for array in lattice.arrays().values()} == {"int16", "int32"}


def test_a_gemm_takes_no_longer_than_one_that_contains_it() -> None:
    rows = gemm_rows()
    bad = (rows["m"] == 16) & (rows["n"] == 512) & (rows["k"] == 512)
    rows.loc[bad, "time_us"] *= 50
    clean = gemms.gemm_cube(rows).cleaned()
    i, j, at = 1, 1, TOKENS.index(16)
    containing = clean.time_us[i:, j:, at:].min()
    assert clean.time_us[i, j, at] == containing == law(16, 512, 1024)
    untouched = gemms.gemm_cube(rows[~bad]).cleaned().time_us
    others = np.isfinite(untouched)
    np.testing.assert_array_equal(clean.time_us[others], untouched[others])


def test_missing_points_are_filled_in_proportion() -> None:
    rows = gemm_rows()
    gone = ((rows["n"] == 4096) & (rows["k"] == 4096) & (rows["m"] > 32)) | (
        (rows["n"] == 1024) & (rows["k"] == 1024)
    )
    lattice = gemms.fit_lattice(gemms.gemm_cube(rows[~gone]))
    assert lattice.time_us(np.array([64.0]), 4096, 4096)[0] == pytest.approx(
        2 * law(32, 4096, 4096)
    )
    filled = lattice.time_us(np.array([8.0]), 1024, 1024)[0]
    assert filled == pytest.approx(2 * law(8, 1024, 512)), "the next smaller k, by n k"


def test_knots_are_kept_where_the_curve_bends() -> None:
    cube = gemms.gemm_cube(gemm_rows())
    knots = gemms.choose_knots(
        lambda kept: np.log(gemms.through(cube, kept) / cube.time_us), len(cube.m)
    )
    assert cube.m[knots].tolist() == [1, 8, 64]
    np.testing.assert_allclose(gemms.through(cube, knots), cube.time_us, rtol=0.06)


def decode_rows(pairs: list[tuple[int, int]], window: float = np.inf) -> pd.DataFrame:
    """A launch of 5 us or reading batch x KV heads x context, the longer counts; all goes with the
    group as its square root."""
    rows = []
    for (heads, kv), batch, context in itertools.product(pairs, [1, 2, 4, 8], [2, 64, 128, 256]):
        reading = 0.01 * batch * kv * min(context, window)
        rows.append((heads, kv, batch, context, np.hypot(5, reading) * np.sqrt(heads / kv)))
    return pd.DataFrame(rows, columns=["heads", "kv_heads", "batch", "context", "time_us"])


def test_decodes_of_other_head_counts() -> None:
    grid = grids.fit_decode(decode_rows([(8, 1), (32, 1), (16, 2), (2, 2)]))
    batch, context = np.array([2.0, 4.0]), np.array([128.0, 64.0])
    wanted = np.hypot(5, 0.01 * batch * 2 * context) * np.sqrt(8)
    np.testing.assert_allclose(grids.decode_us(grid, batch, context, 16, 2), wanted)
    # 4 KV heads of the same group: as twice the sequences.
    twice = grids.decode_us(grid, 2 * batch, context, 16, 2)
    np.testing.assert_allclose(grids.decode_us(grid, batch, context, 32, 4), twice)
    # As many KV heads as query heads are another kernel: never between the others.
    alone = grids.decode_us(grid, np.array([4.0]), np.array([128.0]), 2, 2)
    np.testing.assert_allclose(
        grids.decode_us(grid, np.array([1.0]), np.array([128.0]), 8, 8), alone
    )
    middle = grids.decode_us(grid, batch, context, 16, 1)
    low, high = (grids.decode_us(grid, batch, context, h, 1) for h in (8, 32))
    np.testing.assert_allclose(middle, np.sqrt(low * high))


def test_by_group_other_kv_heads_of_the_same_group_stand_in_first() -> None:
    rows = decode_rows([(4, 1), (16, 1), (16, 2)])
    rows.loc[(rows["heads"] == 16) & (rows["kv_heads"] == 1), "time_us"] *= 3
    batch, context = np.array([2.0]), np.array([64.0])
    for by_group, heads, kv_heads in ((True, 16, 2), (False, 8, 1)):
        grid = grids.fit_decode(rows, by_group)
        found = grids.decode_us(grids.HeadGrid.from_arrays(grid.arrays()), batch, context, 8, 1)
        expected = grids.decode_us(grid, batch * 1 / kv_heads, context, heads, kv_heads)
        np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_decodes_that_did_not_fit_the_memory_go_on_with_the_cache() -> None:
    rows = decode_rows([(8, 1)])
    rows = rows[~((rows["batch"] == 8) & (rows["context"] == 256))]
    grid = grids.fit_decode(rows)
    full = grids.decode_us(grid, np.array([8.0]), np.array([256.0]), 8, 1)[0]
    assert full == pytest.approx(np.hypot(5, 20.48) * np.sqrt(8), rel=1e-4)
    assert grids.HeadGrid.from_arrays(grid.arrays()).measured(8, 1)
    least = decode_rows([(8, 1), (4, 1)])
    lacks = (least["heads"] == 8) & (least["batch"] == least["batch"].min())
    kept = grids.fit_decode(
        least[~lacks]
    )  # one pair was not measured at the smallest batch: as the next
    assert (kept.log_us[1, 0] == kept.log_us[1, 1]).all() and kept.heads[1].tolist() == [8, 1]


def test_decodes_amid_measured_ones_take_no_longer_than_larger_ones() -> None:
    rows = decode_rows([(8, 1)]).set_index(["batch", "context"])
    whole = grids.fit_decode(rows.reset_index())
    # Not measured at the smallest batch from a context on: one sequence is no batch of eight.
    long = grids.fit_decode(rows.drop([(1, 256), (2, 256), (4, 256)]).reset_index())
    np.testing.assert_allclose(long.log_us[0, 0, -1], whole.log_us[0, 0, -1], atol=1e-4)
    # A hole: the law says 0.8 % more for 64 tokens than for 2, but two sequences took 0.1 % more.
    rows.loc[(2, 64), "time_us"] = 1.001 * rows.loc[(1, 2), "time_us"]
    hole = grids.fit_decode(rows.drop([(1, 64)]).reset_index())
    np.testing.assert_allclose(np.exp(hole.log_us[0, :2, 1]), 1.001 * np.exp(hole.log_us[0, 0, 0]))


def test_other_kv_heads_tell_where_a_cache_outgrows_l2() -> None:
    """Squares of times by what is read: a rate up to 512 tokens x KV heads, 25 times it beyond."""
    sizes = [(heads, b, c) for heads in (8, 16, 32) for b in (1, 4) for c in (64, 256, 1024)]
    rows = pd.DataFrame(sizes, columns=["heads", "batch", "context"])
    rows["kv_heads"] = rows["heads"] // 8
    read = rows["kv_heads"] * rows["batch"] * rows["context"]
    beyond = np.maximum(read**2 - 512**2, 0)
    rows["time_us"] = np.sqrt(100 + 1e-4 * np.minimum(read, 512) ** 2 + 25e-4 * beyond)
    # 2 x 256 tokens of one KV head: only two KV heads were measured so; lines would say 22 us.
    found = grids.decode_us(grids.fit_decode(rows), np.array([2.0]), np.array([256.0]), 8, 1)[0]
    assert found == pytest.approx(np.sqrt(100 + 26.2), rel=0.01)


def test_decodes_within_a_window_take_no_longer_beyond_it() -> None:
    rows = decode_rows([(8, 1)], window=128)
    grid = grids.fit_decode(rows[(rows["batch"] < 8) | (rows["context"] < 256)], window=128)
    np.testing.assert_allclose(grid.log_us[0, :, -1], grid.log_us[0, :, -2], atol=1e-9)
    whole = decode_rows([(8, 1)])
    longer = grids.fit_decode(whole[(whole["batch"] < 8) | (whole["context"] < 256)])
    assert longer.log_us[0, -1, -1] > longer.log_us[0, -1, -2] + 0.5


def test_decodes_lie_between_measured_neighbours() -> None:
    rows = decode_rows([(8, 1), (16, 2)])
    rows["time_us"] *= np.random.default_rng(0).uniform(0.8, 1.25, len(rows))
    grid = grids.fit_decode(rows)
    times = np.exp(grid.log_us[0])
    batches, contexts = grid.sizes
    known = grids.decode_us(grid, batches[:, None], contexts, 8, 1)
    np.testing.assert_allclose(known, times)
    inside = grids.decode_us(grid, 1.3 * batches[:-1, None], 1.3 * contexts[:-1], 8, 1)
    assert (inside >= times[:-1, :-1]).all() and (inside <= times[1:, 1:]).all()
    # Beyond the largest batch on the line through the last two.
    twice = grids.decode_us(grid, np.full(4, 16.0), contexts, 8, 1)
    np.testing.assert_allclose(twice, 3 * times[-1] - 2 * times[-2])


def test_a_decode_that_did_not_fit_the_memory_takes_no_less_than_a_smaller_one() -> None:
    """Eight short ones were measured, and two long ones: eight long ones were not."""
    times = np.log([[[8.0, 9.0], [20.0, 10.0]]])
    sizes = np.array([2.0, 8.0]), np.array([64.0, 4096.0])
    grid = grids.HeadGrid(np.array([[8, 1]]), sizes, times)
    found = grids.decode_us(grid, sizes[0][:, None], sizes[1], 8, 1, window=128.0)
    np.testing.assert_allclose(found, [[8, 9], [20, 20]])


def test_head_counts_lie_between_others_of_their_kind_or_beyond() -> None:
    pairs = [(1, 1), (2, 2), (4, 4), (4, 1), (8, 1), (16, 1), (8, 2)]
    grid = grids.HeadGrid(np.array(pairs), (np.array([1.0]),), np.zeros((len(pairs), 1)))
    for pair, prefill, decode in (
        ((3, 3), True, True),  # MHA among MHA
        ((8, 8), False, True),  # a decode of 8 KV heads is one of more sequences
        ((12, 1), True, True),
        ((32, 1), False, False),
        ((3, 1), False, False),
    ):
        assert grid.between(*pair, decode=False) == prefill, pair
        assert grid.between(*pair, decode=True) == decode, pair


def test_kv_heads_an_octave_off_stand_in_before_nearer_ones() -> None:
    """They lead from measured batches to measured ones; two octaves are too far."""
    for other, wanted in ((12, 12), (3, 3), (24, 5)):
        pairs = np.array([(5, 5), (other, other)])
        grid = grids.HeadGrid(pairs, (np.ones(1),), np.zeros((2, 1)))
        assert grid.nearest_kv(6, 6) == wanted


def test_a_law_of_prompts_holds_beyond_what_was_measured() -> None:
    """10 us, 0.05 us a key of the last block, 1e-3 us a row and 1e-5 us a pair of each head."""

    def cost(heads: int, chunk: Array, window: float) -> Array:
        walked = np.clip(chunk, 128, window + 256) - 128
        inside = np.minimum(chunk, window)
        pairs = inside**2 / 2 + (chunk - inside) * (inside - 0.5)
        return 10 + 0.05 * walked + heads * (1e-3 * chunk + 1e-5 * pairs)

    sizes = np.array([16.0, 64.0, 256.0, 1024.0, 4096.0])
    chunk = np.array([1.0, 16.0, 777.0, 16384.0])
    for window in (512.0, np.inf):
        rows = pd.DataFrame(
            [
                (h, 1, c, t)
                for h in (4, 16)
                for c, t in zip(sizes, cost(h, sizes, window), strict=True)
            ],
            columns=["heads", "kv_heads", "chunk", "time_us"],
        )
        for heads in (4, 8, 64):
            found = grids.prefill_us(grids.fit_prefill(rows), chunk, heads, 1, window)
            np.testing.assert_allclose(
                found, cost(heads, np.maximum(chunk, 16.0), window), rtol=1e-6
            )


def test_what_prompts_take_over_the_law_is_kriged() -> None:
    """10 and 20 us where the law counts the same: their mean by relative error is 12 us."""
    grid = grids.HeadGrid(np.array([[4, 1], [4, 4]]), (np.array([16.0]),), np.log([[10.0], [20.0]]))
    off, one, fold = np.log(np.array([10.0, 20.0]) / 12.0), np.array([16.0]), np.log(2.0)
    # A row says 1 + 0.25 + 0.04 of itself, and less of other KV heads by an e-fold in 8.
    expected = 12.0 * np.exp(1.25 * np.exp(-fold / 8) * off.sum() / (1.29 + 1.25 * 4**-0.125))
    np.testing.assert_allclose(grids.prefill_us(grid, one, 4, 2), [expected], rtol=1e-9)
    np.testing.assert_allclose(grids.prefill_us(grid, one, 4, 4), 20.0, rtol=1e-9)
    # A quarter of the heads with four times the chunk: as many blocks.
    rows = np.array([[256.0, 4.0, 1.0, 1.0], [1024.0, 1.0, 1.0, 1.0]])
    waves = 0.25 * np.exp(-2 * fold / 2)
    expected = np.exp(-2 * fold * (1 / 2.5 + 1 / 8)) + waves
    np.testing.assert_allclose(likeness(rows[:1], rows), [[1.29, expected]], rtol=1e-9)
    # Half the chunk at the same head counts.
    rows = np.array([[256.0, 4.0, 1.0, 1.0], [512.0, 4.0, 1.0, 1.0]])
    expected = np.exp(-fold / 2.5) + 0.25 * np.exp(-fold / 0.8) + 0.04 * np.exp(-fold / 0.1)
    np.testing.assert_allclose(likeness(rows[:1], rows), [[1.29, expected]], rtol=1e-9)
    # As many blocks in two prompts of half the query heads.
    rows = np.array([[256.0, 4.0, 1.0, 1.0], [256.0, 2.0, 1.0, 2.0]])
    expected = np.exp(-fold * 2 / 8) + 0.25 * np.exp(-fold)
    np.testing.assert_allclose(likeness(rows[:1], rows), [[1.29, expected]], rtol=1e-9)


def test_a_fault_of_a_measurement_says_nothing() -> None:
    """A prompt of 16 tokens that takes 100 times as long as it should; 3 times may be true."""
    heads, sizes = np.array([[1, 1], [2, 1]]), np.array([1.0, 16.0, 64.0])
    others = []
    for slow in (3.0, 100.0):
        log_us = np.log([[10.0, 10.0 * slow, 40.0], [10.0, 10.0, 40.0]])
        grid = grids.HeadGrid(heads, (sizes,), log_us)
        own = grids.prefill_us(grid, sizes, 1, 1)
        np.testing.assert_allclose(own[[0, 2]], [10.0, 40.0])
        assert own[1] == pytest.approx(30.0) if slow == 3.0 else own[1] < 40.0
        others.append(grids.prefill_us(grid, np.array([8.0]), 2, 1)[0])
    assert others[1] < others[0], "what is true says something of other head counts"


@pytest.mark.parametrize("heads", [4, 6])
def test_a_prompt_takes_no_longer_than_a_longer_one(heads: int) -> None:
    """256 tokens were measured to take 1.4 times as long as 512, of measured heads and others."""
    sizes = np.array([64.0, 128.0, 256.0, 512.0, 1024.0])
    times = np.array([10.0, 14.0, 70.0, 50.0, 90.0])
    grid = grids.HeadGrid(
        np.array([[4, 1], [8, 1]]), (sizes,), np.log(times * np.array([[1], [2]]))
    )
    whole = grids.prefill_us(grid, np.arange(1.0, 4097.0), heads, 1)
    assert (np.diff(whole) >= -1e-3 * whole[:-1]).all()
    measured = grids.prefill_us(grid, sizes, 4, 1)
    np.testing.assert_allclose(measured, [10.0, 14.0, 50.0, 50.0, 90.0], rtol=1e-6)


def test_calls_of_several_prompts_follow_the_law_of_their_blocks() -> None:
    """12 us of launch and what each adds. What is off the law stays as it was measured."""
    batches, heads, chunks = (1, 2, 4, 16, 64), (4, 16), (16, 64, 256)
    rows = pd.DataFrame(
        [(b, h, 1, c, 12 + 1e-3 * b * h * c) for b in batches for h in heads for c in chunks],
        columns=["batch", "heads", "kv_heads", "chunk", "time_us"],
    )
    slow = rows.assign(time_us=rows["time_us"] * np.where(rows["batch"] == 4, 2, 1))
    alone, added = grids.fit_prefill(slow[slow["batch"] == 1]), grids.fit_added(slow)
    added = grids.HeadGrid.from_arrays(added.arrays())
    assert added.sizes[0].tolist() == [2, 4, 16, 64]
    chunk = np.array([16.0, 64.0, 256.0])
    for batch, heads_of in ((1, 4), (4, 16), (64, 4)):
        found = grids.together_us(alone, added, np.array([batch]), chunk, heads_of, 1)
        part = slow.query("batch == @batch and heads == @heads_of")
        np.testing.assert_allclose(found, part["time_us"], rtol=1e-3)  # a step is 0.06 %


def test_a_batch_that_was_not_measured_lies_between_its_neighbours() -> None:
    """And beyond the largest one that fitted the memory each prompt adds as much as in that."""
    rows = pd.DataFrame(
        [(1, 16, 8.0), (2, 16, 8.0), (4, 16, 16.0), (8, 16, 32.0), (1, 64, 20.0), (4, 64, 50.0)],
        columns=["batch", "chunk", "time_us"],
    ).assign(heads=4, kv_heads=1)
    shares = np.exp(grids.fit_added(rows).log_us[0])
    np.testing.assert_allclose(shares.T, [[4, 4, 4], [15, 12.5, 12.5]])


def test_messages_never_take_longer_than_larger_ones() -> None:
    rows = pd.DataFrame({"num_bytes": [256, 512, 1024, 2048], "time_us": [3.0, 9.0, 4.0, 6.0]})
    curve = ReduceCurve.from_arrays(fit_reduce(rows).arrays())
    sizes = np.array([128.0, 256.0, 512.0, 1536.0, 4096.0])
    np.testing.assert_allclose(curve.time_us(sizes), [3.0, 3.0, 4.0, 5.0, 12.0], rtol=1e-3)


def test_messages_reach_a_share_of_their_law() -> None:
    """3 us and 1 us for 256 bytes; half of it is reached at 1 KB, all at 4 KB (19 us)."""
    rows = pd.DataFrame({"num_bytes": [256, 1024, 4096], "time_us": [3.0, 14.0, 16.0]})
    curve = fit_reduce(rows)
    # The law: 4, 7 and 19 us, of which 4/3, 1/2 and 19/16 are reached; 2 KB lie halfway.
    between = 11.0 / ((7 / 14 + 19 / 16) / 2)
    assert curve.time_us(np.array([2048.0]))[0] == pytest.approx(max(between, 14.0))
    slow = fit_reduce(rows.assign(time_us=[3.0, 10.0, 16.0]))
    assert slow.time_us(np.array([2048.0]))[0] == pytest.approx(11.0 / ((0.7 + 19 / 16) / 2))


def test_a_chunk_after_a_prefix_fills_the_gpu_or_takes_as_long() -> None:
    """32 heads: 256 queries have a block of 64 for each of 128 units. A pair takes 1 ns."""
    lengths = np.array([64.0, 256.0, 1024.0, 8192.0])
    pairs = lengths * (lengths / 2 + 64)
    fresh = pd.DataFrame({"chunk": lengths, "time_us": 1e-3 * pairs}).assign(heads=32, kv_heads=8)
    prompt = grids.fit_prefill(fresh)
    sizes = [(c, p, 32, 8) for c in (64, 128, 512) for p in (128, 512, 2048)]
    rows = pd.DataFrame(sizes, columns=["chunk", "context", "heads", "kv_heads"])
    chunk, context = (rows[c].to_numpy(np.float64) for c in ("chunk", "context"))
    alone = grids.prefill_us(prompt, chunk, 32, 8)
    expected = alone + 1e-3 * np.maximum(chunk, 256) * context
    found = grids.expected_us(prompt, chunk, context, 32, 8, 128)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    # Twice as long with 64 tokens, and 5 us at any size: linear in the cached tokens.
    rows["time_us"] = np.where(chunk == 64, 2 * expected, expected) + 5.0
    grid, one = grids.fit_prefix(rows, prompt, 128), np.ones(1)
    found = grids.prefix_us(grid, prompt, chunk, context, 32, 8, 128)
    np.testing.assert_allclose(found, rows["time_us"], rtol=1e-9)
    found = grids.prefix_us(grid, prompt, 128 * one, 300 * one, 32, 8, 128)
    assert found == pytest.approx(alone[3] + 1e-3 * 256 * 300 + 5)
    edge = rows["time_us"][0] / expected[0]
    beyond = grids.prefix_us(grid, prompt, 64 * one, 16 * one, 32, 8, 128)
    assert beyond == pytest.approx(edge * (alone[0] + 1e-3 * 256 * 16))
