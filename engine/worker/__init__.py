"""Runs step plans on a real model: loading, paged attention, sampling. Knows no queue and no policy."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # For how many rounds a thread that waits for another spins before it sleeps; read as the first OpenMP
    # library is loaded. Its own default, 300,000, suits threads that have a core each; where a front end
    # takes its turns on the same cores, they keep out whom they wait for.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# How many products, of a weight and so many rows, oneDNN and what torch puts before it keep compiled, up to
# 0.7 MB each: those of some forty sizes of step. Their own default, 1024, fills as prompts of ever new
# lengths come. Read with the first product.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "192")
