"""Runs step plans on a real model: loading, paged attention, sampling. Knows no queue and no policy."""
