"""``python -m benchmarks.estimate``."""

import sys

from benchmarks.estimate.command import main

if __name__ == "__main__":
    sys.exit(main())
