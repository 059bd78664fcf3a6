"""The exported trees are scikit-learn's, and survive the disk without pickle."""

from __future__ import annotations

import io

import numpy as np
import pytest

from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.physics.residual import (
    Curve,
    Trees,
    fit_curve,
    fit_trees,
    residual_from_arrays,
)


@pytest.fixture(scope="module")
def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(7)
    features = rng.normal(size=(800, 5))
    features[:, 1] = np.round(features[:, 1] * 3)  # ties, as in counts of tiles
    target = np.sin(features[:, 0]) + 0.2 * features[:, 1] * (features[:, 2] > 0)
    return features, target


def test_exported_trees_predict_what_sklearn_predicts(data: tuple[Array, Array]) -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor

    features, target = data
    model = HistGradientBoostingRegressor(max_iter=40, random_state=0).fit(features, target)
    unseen = np.random.default_rng(8).normal(scale=2, size=(500, 5))
    for rows in (features, unseen):
        ours = Trees.from_sklearn(model).predict(rows)
        np.testing.assert_allclose(ours, model.predict(rows), rtol=1e-6, atol=1e-6)


def test_few_rows_take_their_own_way_to_the_same_numbers(data: tuple[Array, Array]) -> None:
    features, target = data
    trees = fit_trees(features, target, 40, 31)
    whole = trees.predict(features)
    parts = [trees.predict(features[at : at + 3]) for at in range(0, 60, 3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole[:60])


def test_trees_and_curve_survive_npz_without_pickle(data: tuple[Array, Array]) -> None:
    features, target = data
    for residual in (fit_trees(features, target, 10, 8), fit_curve(features[:, 0], target, 12)):
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **residual.arrays())
        buffer.seek(0)
        with np.load(buffer, allow_pickle=False) as stored:
            read = residual_from_arrays({name: stored[name] for name in stored.files})
        assert type(read) is type(residual)
        np.testing.assert_array_equal(read.predict(features), residual.predict(features))


def test_curve_passes_through_group_medians_and_is_flat_outside() -> None:
    x = np.array([1.0, 1.0, 1.0, 2.0, 3.0])
    y = np.array([0.1, 0.2, 0.9, 0.4, 0.6])
    curve = fit_curve(x, y, knots=24)
    assert isinstance(curve, Curve)
    at = np.array([[0.0], [1.0], [1.5], [3.0], [9.0]])
    np.testing.assert_allclose(curve.predict(at), [0.2, 0.2, 0.3, 0.6, 0.6])
