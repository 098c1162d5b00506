"""Runs step plans on a real model: loading, paged attention, sampling. Knows no queue and no policy."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # How many rounds a waiting OpenMP thread spins before it sleeps; read when the first OpenMP library is
    # loaded. libgomp's default, 300,000, suits threads that have a core each. Where an API server process
    # shares the cores, spinning threads keep it from running.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# How many compiled GEMMs (one per weight and number of rows, up to 0.7 MB each) oneDNN and torch's own cache
# keep: enough for some forty step sizes. The default, 1024, fills up as prompts of new lengths arrive. Both
# caches read it at the first GEMM.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "192")
