"""Computes prompts of layers with states in chunks of tokens, in Triton."""
