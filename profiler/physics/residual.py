"""The residual of the physics: a learned log ratio measured / physics, stored as plain arrays.

Two kinds: boosted trees over many features, and a curve over one. Both are read from and written to
numpy arrays; scikit-learn is imported only to fit, and nothing is ever pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..facts.roofline import Array
from ..storage.child import one_thread

Arrays = dict[str, npt.NDArray[Any]]
#: Rows up to which gathering nodes takes less than comparing all rows in every node.
_FEW = 16
#: Rows that are compared at a time: neighbouring rows, which are often alike, go one way in most
#: nodes, and the columns stay in the processor's cache.
_AT_ONCE = 16384


@dataclass(frozen=True, eq=False)
class Trees:
    """A boosted ensemble: every node of every tree in flat arrays. ``roots[t]`` is the first node
    of tree t; ``left`` and ``right`` are node numbers in the flat arrays (a leaf points at itself);
    ``threshold`` goes left when ``feature <= threshold``."""

    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.int16]
    threshold: Array
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: npt.NDArray[np.float32]
    baseline: float
    depth: int

    def predict(self, features: Array) -> Array:
        """Log ratios, one per row of ``features`` (rows x features)."""
        if len(features) <= _FEW:
            return self._descend(features)
        starts = range(0, len(features), _AT_ONCE)
        return np.concatenate([self._compare(features[i : i + _AT_ONCE]) for i in starts])

    def _compare(self, features: Array) -> Array:
        """As :meth:`predict`, for many rows. Every split is compared for all of them, instead of
        each row's path: a dozen comparisons a tree, without a gather, which is ten times faster.
        None is where all rows go one way."""
        columns = np.ascontiguousarray(features.T)
        low, high = columns.min(axis=1).tolist(), columns.max(axis=1).tolist()
        left, right = self.left.tolist(), self.right.tolist()
        feature, threshold = self.feature.tolist(), self.threshold.tolist()

        def values(node: int) -> Any:
            if left[node] == node:
                return self.value[node]
            if high[feature[node]] <= threshold[node]:
                return values(left[node])
            if low[feature[node]] > threshold[node]:
                return values(right[node])
            goes_left = columns[feature[node]] <= threshold[node]
            return np.where(goes_left, values(left[node]), values(right[node]))

        total = np.full(len(features), self.baseline)
        for root in self.roots.tolist():
            total += values(root)
        return total

    def _descend(self, features: Array) -> Array:
        """As :meth:`predict`, for few rows: each follows its path down all trees at once."""
        node = np.tile(self.roots, (len(features), 1))
        rows = np.arange(len(features))[:, np.newaxis]
        for _ in range(self.depth):
            goes_left = features[rows, self.feature[node]] <= self.threshold[node]
            node = np.where(goes_left, self.left[node], self.right[node])
        values = np.insert(
            self.value[node].astype(np.float64),
            0,
            self.baseline,
            axis=1,
        )
        total: Array = np.cumsum(values, axis=1)[:, -1]  # tree by tree, as of many rows
        return total

    def arrays(self) -> Arrays:
        """The arrays to store; :meth:`from_arrays` is the inverse."""
        return {
            "roots": self.roots,
            "feature": self.feature,
            "threshold": self.threshold,
            "left": self.left,
            "right": self.right,
            "value": self.value,
            "scalars": np.array([self.baseline, self.depth], dtype=np.float64),
        }

    @staticmethod
    def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Trees:
        scalars = arrays["scalars"]
        names = ("roots", "feature", "threshold", "left", "right", "value")
        stored = {name: arrays[name] for name in names}
        return Trees(
            **stored,
            baseline=float(scalars[0]),
            depth=int(scalars[1]),
        )

    @staticmethod
    def from_sklearn(model: Any) -> Trees:
        """Export a fitted HistGradientBoostingRegressor (numeric features, no missing values)."""
        nodes = [stage[0].nodes for stage in model._predictors]
        starts = np.cumsum([0] + [len(n) for n in nodes[:-1]])
        flat = np.concatenate(nodes)
        offset = np.repeat(starts, [len(n) for n in nodes])
        here = np.arange(len(flat))
        leaf = flat["is_leaf"].astype(bool)
        return Trees(
            roots=starts.astype(np.int32),
            feature=np.where(leaf, 0, flat["feature_idx"]).astype(np.int16),
            threshold=np.where(leaf, 0.0, flat["num_threshold"]),
            left=np.where(leaf, here, flat["left"] + offset).astype(np.int32),
            right=np.where(leaf, here, flat["right"] + offset).astype(np.int32),
            value=np.where(leaf, flat["value"], 0.0).astype(np.float32),
            baseline=float(np.ravel(model._baseline_prediction)[0]),
            depth=int(max(n["depth"].max() for n in nodes)),
        )


@dataclass(frozen=True, eq=False)
class Curve:
    """A log ratio piecewise-linear in one feature, constant beyond its first and last knot."""

    knots: Array
    values: Array

    def predict(self, features: Array) -> Array:
        """Log ratios from column 0 of ``features``."""
        ratio: Array = np.interp(features[:, 0], self.knots, self.values)
        return ratio

    def arrays(self) -> Arrays:
        return {"knots": self.knots, "values": self.values}

    @staticmethod
    def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Curve:
        return Curve(knots=arrays["knots"], values=arrays["values"])


Residual = Trees | Curve


def residual_from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Residual:
    """The residual that these stored arrays hold."""
    return Curve.from_arrays(arrays) if "knots" in arrays else Trees.from_arrays(arrays)


def fit_trees(features: Array, log_ratio: Array, iterations: int, leaves: int) -> Trees:
    """Fit boosted trees to the log ratio; deterministic. Needs scikit-learn."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        max_iter=iterations,
        max_leaf_nodes=leaves,
        learning_rate=0.1,
        min_samples_leaf=10,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=0,
    )
    with one_thread():
        return Trees.from_sklearn(model.fit(features, log_ratio))


def fit_curve(feature: Array, log_ratio: Array, knots: int) -> Curve:
    """Medians of the log ratio in up to ``knots`` groups of neighbouring feature values."""
    order = np.argsort(feature, kind="stable")
    distinct = np.unique(feature)
    edges = distinct if len(distinct) <= knots else np.quantile(distinct, np.linspace(0, 1, knots))
    middle = (edges[1:] + edges[:-1]) / 2
    group = np.searchsorted(middle, feature[order])
    x, y = feature[order], log_ratio[order]
    used = np.unique(group)
    return Curve(
        knots=np.array([np.median(x[group == g]) for g in used]),
        values=np.array([np.median(y[group == g]) for g in used]),
    )
