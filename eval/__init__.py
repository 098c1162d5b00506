"""Workloads, the benchmark client and its reports."""
