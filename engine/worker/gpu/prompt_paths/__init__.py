"""Prefill attention by kernels of other libraries, which share one interface; none is required."""
