"""Settings that every test needs before anything heavy is imported."""

from __future__ import annotations

import os

# Tiny models gain nothing from threads, and tests share the machine; sub-processes inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that would reach the hub is wrong: it must fail at once, not wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings

# Wall time says nothing about a property on a shared machine.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")
