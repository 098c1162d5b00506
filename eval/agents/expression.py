"""Evaluates a model's Python expression (numbers, texts, lists) in a separate process."""

from __future__ import annotations

import ast
import subprocess
import sys

from eval.agents.sandbox import Refused

MAX_CHARACTERS = 500
MAX_RESULT_CHARACTERS = 500
MEMORY_BYTES = 512 * 2**20

_FUNCTIONS = {
    function.__name__: function
    for function in (abs, bool, divmod, float, int, len, list, max, min, pow, round, set, sorted, str, sum)
}
_NODES = (
    ast.Expression,
    ast.Constant,
    *(ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load, ast.Name, ast.Call, ast.keyword),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
"""Contains no attribute, comprehension or assignment, so an expression cannot reach a file or a module."""


def checked(expression: str) -> ast.Expression:
    """Returns the expression's tree; raises ``Refused`` for text that is invalid or may do more than
    compute."""
    if len(expression) > MAX_CHARACTERS:
        raise Refused(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused("this is not a Python expression") from error
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise Refused(f"{type(node).__name__.lower()} is not allowed in an expression")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
            raise Refused(f"name {node.id!r} is not defined")
    return tree


def evaluate_here(expression: str) -> str:
    """Returns the result as text, computed in this process: only for trusted expressions."""
    code = compile(checked(expression), "<expression>", "eval")
    try:
        result = eval(code, {"__builtins__": {}}, dict(_FUNCTIONS))
        return str(result)[:MAX_RESULT_CHARACTERS]
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def evaluate(expression: str, timeout_s: float = 5.0) -> str:
    """Returns the result or error as text, computed in a process with a time and a memory limit."""
    checked(expression)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, str(MEMORY_BYTES), str(max(1, int(timeout_s)))],
            input=expression.strip(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"error: the expression took longer than {timeout_s:g} s"
    if done.returncode != 0:
        return "error: the expression needs too much time or memory"
    return done.stdout


_CHILD = f"""
import resource, sys
memory, seconds = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
names = {{name: getattr(__import__("builtins"), name) for name in {sorted(_FUNCTIONS)!r}}}
try:
    result = str(eval(sys.stdin.read(), {{"__builtins__": {{}}}}, names))
except Exception as error:
    result = f"error: {{type(error).__name__}}: {{error}}"
sys.stdout.write(result[:{MAX_RESULT_CHARACTERS}])
"""
