"""Kernels of others for the attention of prompts, each behind the same call; none of them is required."""
