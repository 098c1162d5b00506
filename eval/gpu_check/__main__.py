"""``python -m eval.gpu_check``."""

import sys

from eval.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
