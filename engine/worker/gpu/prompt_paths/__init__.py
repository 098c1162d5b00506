"""Prefill attention by kernels of other libraries, each behind the same interface; none is required."""
