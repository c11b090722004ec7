"""`python -m cluster` is the command `kvferry`."""

from __future__ import annotations

from cluster.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
