"""`python -m infinity`."""

import sys

from infinity.cli import main

if __name__ == "__main__":
    sys.exit(main())
