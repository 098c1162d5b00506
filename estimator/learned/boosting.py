"""Gradient boosting by scikit-learn, exported as plain arrays. Only this module imports scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from estimator.learned.trees import LEAF, Trees

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sklearn.ensemble import GradientBoostingRegressor

    Array = NDArray[np.float64]

STEP = 0.05
SUBSAMPLE = 0.5


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a model: small trees and many rows per leaf, because the rows of one job resemble each
    other."""

    num_trees: int
    num_leaves: int
    leaf_rows: int


def fit(rows: Array, targets: Array, size: Size, quantile: float | None = None) -> GradientBoostingRegressor:
    """Fits a model that predicts the mean, or a quantile, of a target [num_rows] from its row [num_rows,
    num_features]."""
    from sklearn.ensemble import GradientBoostingRegressor

    model = GradientBoostingRegressor(
        loss="squared_error" if quantile is None else "quantile",
        alpha=0.9 if quantile is None else quantile,
        n_estimators=size.num_trees,
        learning_rate=STEP,
        max_leaf_nodes=size.num_leaves,
        min_samples_leaf=min(size.leaf_rows, max(1, len(rows) // 10)),
        subsample=SUBSAMPLE,
        random_state=0,
    )
    return model.fit(rows, targets)


def folds_of(groups: Sequence[str], num_folds: int) -> NDArray[np.int64]:
    """The fold of each row, determined by its group: [num_rows]."""
    fold_of = {group: number % num_folds for number, group in enumerate(sorted(set(groups)))}
    return np.array([fold_of[group] for group in groups])


def fit_held_out(
    rows: Array, targets: Array, folds: NDArray[np.int64], size: Size, quantile: float | None = None
) -> Array | None:
    """The prediction for each row by a model of the other folds [num_rows]; None if there is only one
    fold."""
    predicted = np.zeros(len(rows))
    for fold in np.unique(folds):
        held_out = folds == fold
        if held_out.all():
            return None
        model = fit(rows[~held_out], targets[~held_out], size, quantile)
        predicted[held_out] = model.predict(rows[held_out])
    return predicted


def export(model: GradientBoostingRegressor) -> Trees:
    """Returns the fitted trees as arrays, read from the public attributes of scikit-learn's trees."""
    roots: list[int] = []
    features: list[int] = []
    thresholds: list[float] = []
    left: list[int] = []
    right: list[int] = []
    values: list[float] = []
    for estimator in model.estimators_[:, 0]:
        tree = estimator.tree_
        first = len(features)
        roots.append(first)
        is_leaf = tree.children_left < 0
        features += np.where(is_leaf, LEAF, tree.feature).tolist()
        thresholds += np.where(is_leaf, 0.0, tree.threshold).tolist()
        left += np.where(is_leaf, 0, tree.children_left + first).tolist()
        right += np.where(is_leaf, 0, tree.children_right + first).tolist()
        values += (model.learning_rate * tree.value[:, 0, 0]).tolist()
    return Trees(float(model.init_.constant_.flat[0]), roots, features, thresholds, left, right, values)
