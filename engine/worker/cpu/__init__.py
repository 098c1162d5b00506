"""The CPU backend: its runner, compiled kernels, packed and quantized weights, sampler."""
