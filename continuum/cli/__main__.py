"""``python -m continuum.cli``: the ``continuum`` command, where it is not installed."""

import sys

from continuum.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
