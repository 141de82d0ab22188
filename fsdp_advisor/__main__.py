"""`python -m fsdp_advisor`: the command line."""

from __future__ import annotations

import sys

from fsdp_advisor.cli import main

if __name__ == "__main__":
    sys.exit(main())
