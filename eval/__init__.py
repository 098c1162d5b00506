"""Workloads, the load generator, the demo and their reports.

Never write a bare ``import eval``: it would hide the builtin. Write ``from eval.load.bench import main``.
"""
