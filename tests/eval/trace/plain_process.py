"""``python -m tests.eval.trace.plain_process FILE`` replays a trace in a process with plain arithmetic only:
numpy has no functions, and whatever C libraries or Python versions compute differently raises an error."""

from __future__ import annotations

import builtins
import math
import random  # Needs logarithms itself while it is imported.
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

NEEDED = {"ndarray", "bool_", "dtype", "float64", "int64", "integer", "floating", "generic", "number"}
"""Names of numpy used in annotations and by empty arrays."""
BY_LIBRARY = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "cbrt", "hypot", "dist", "sumprod"),
    *("gamma", "lgamma", "erf", "erfc", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh"),
)
"""Functions of ``math`` that differ by library, as IEEE 754 does not define them."""


class _Nothing(ModuleType):
    """numpy without functions."""

    def __getattr__(self, name: str) -> Any:
        if name in NEEDED or name == "NDArray":
            return dict[Any, Any]
        if name == "empty":
            return lambda shape, dtype: ()
        raise AttributeError(f"{self.__name__}.{name} was used")


def _refuse(name: str) -> Any:
    def refuse(*_: object) -> float:
        raise ArithmeticError(f"math.{name} was used")

    return refuse


def _sum_of_integers(values: Iterable[Any], start: Any = 0) -> Any:
    total = start
    for value in values:
        if isinstance(value, float):
            raise ArithmeticError("sum() added floats, which it compensates from Python 3.12 on")
        total += value
    return total


def main() -> None:
    assert random is not None
    for name in ("numpy", "numpy.typing"):
        sys.modules[name] = _Nothing(name)
    sys.modules["numpy"].typing = sys.modules["numpy.typing"]  # type: ignore[attr-defined]
    for name in BY_LIBRARY:
        setattr(math, name, _refuse(name))
    builtins.sum = _sum_of_integers
    from eval.trace.replay.replay import replay

    print(replay(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
