"""``python -m benchmarks.drafts``."""

import sys

from benchmarks.drafts.command import main

if __name__ == "__main__":
    sys.exit(main())
