"""Runs step plans on a real model: loading, paged attention, sampling. Knows no queue and no policy."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # For how many rounds a thread that waits for another spins before it sleeps; read as the first OpenMP
    # library is loaded. Its own default, 300,000, suits threads that have a core each; where a front end
    # takes its turns on the same cores, they keep out whom they wait for.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
