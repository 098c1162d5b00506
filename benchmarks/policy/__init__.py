"""The agent policy against all others: a grid of workloads, loads and tiers, simulated."""
