"""``python -m eval.cpu_bench``."""

import sys

from eval.cpu_bench.command import main

if __name__ == "__main__":
    sys.exit(main())
