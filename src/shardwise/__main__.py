"""`python -m shardwise`: the same as the `shardwise` command."""

import sys

from shardwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
