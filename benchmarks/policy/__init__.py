"""Compares the agent policy with all others: a simulated grid of workloads, loads and tiers."""
