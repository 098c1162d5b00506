"""The V1-style engine: scheduler, paged KV cache, workers, processes and the HTTP server.

Knows nothing of jobs beyond their names: what to do about a job is a policy's (``engine.policy``).
"""
