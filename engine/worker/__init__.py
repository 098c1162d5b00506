"""Runs step plans on a real model: loading, paged attention, sampling. Knows nothing of queues or policies."""
