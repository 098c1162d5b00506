"""``python -m eval.policy_bench``."""

import sys

from eval.policy_bench.command import main

if __name__ == "__main__":
    sys.exit(main())
