#!/usr/bin/env python3
"""Submits the cache-transceiver test: `python slurm/cache_transceiver_test/submit.py [-c FILE] [--dry-run]`.

The same as `kvferry transceiver-test -c FILE --submit`; the default file lies beside this script.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.cli import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not any(word in ("-c", "--config") for word in arguments):
        arguments += ["-c", str(Path(__file__).with_name("config.yaml"))]
    sys.exit(main(["transceiver-test", "--submit", *arguments]))
