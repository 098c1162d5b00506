"""``python -m benchmarks.policy``."""

import sys

from benchmarks.policy.command import main

if __name__ == "__main__":
    sys.exit(main())
