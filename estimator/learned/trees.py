"""Boosted regression trees as plain arrays, evaluated here without the library that made them.

Uses only comparisons and additions of doubles, one at a time, so that a replay on another machine decides the
same (see ``estimator.plain_math``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

MAX_NODES = 65_536
MAX_TOOLS = 64
LEAF = -1
"""The feature of a node that has no children."""

Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class ModelError(ValueError):
    """The bytes are not a model that this version can use. The message is a clause."""


class Trees(msgspec.Struct, frozen=True):
    """A sum of trees. One list holds the nodes of all trees; a node's children come after it."""

    base: Finite
    """Constant added to the sum of the leaves."""
    roots: list[int]
    features: list[int]
    """The feature that a node compares: [num_nodes]; LEAF in a leaf."""
    thresholds: list[Finite]
    """A row goes left if its feature is at most this: [num_nodes]."""
    left: list[int]
    right: list[int]
    values: list[Finite]
    """Values of the leaves: [num_nodes]."""

    def predict(self, row: Sequence[float]) -> float:
        """The sum of the leaves that the row (num_features,) reaches, plus the base."""
        features = self.features
        thresholds = self.thresholds
        left = self.left
        right = self.right
        total = self.base
        for node in self.roots:
            while (feature := features[node]) >= 0:
                node = left[node] if row[feature] <= thresholds[node] else right[node]
            total += self.values[node]
        return total

    def fault(self, num_features: int) -> str | None:
        """Why these trees cannot evaluate rows of ``num_features`` features; None if they can."""
        num_nodes = len(self.features)
        arrays = (self.thresholds, self.left, self.right, self.values)
        if num_nodes > MAX_NODES or any(len(array) != num_nodes for array in arrays):
            return f"its arrays are not of one length of at most {MAX_NODES}"
        if any(not 0 <= root < num_nodes for root in self.roots):
            return "a root is no node"
        for node, feature in enumerate(self.features):
            if not LEAF <= feature < num_features:
                return f"node {node} compares feature {feature} of {num_features}"
            children = (self.left[node], self.right[node])
            if feature != LEAF and not all(node < child < num_nodes for child in children):
                return f"a child of node {node} does not come after it"
        return None if all(map(math.isfinite, (self.base, *self.thresholds, *self.values))) else "no number"
