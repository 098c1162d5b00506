"""Prompts of layers with states by chunks of tokens, in Triton."""
