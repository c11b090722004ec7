"""`main`: runs the command line and turns a user's mistakes into one message and an exit status.

0 is success, 1 an error while running, 2 a wrong command line or configuration. Must not import torch, ray or pydantic:
`--help` has to answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

# Modules whose error class, when it is raised, is the user's to read: a message, no traceback. Only those already
# imported can have raised anything.
_USER_ERRORS = (
    ("cluster.errors", "ClusterError"),
    ("cluster.engine.errors", "EngineError"),
    ("transceiver.errors", "TransceiverError"),
    ("kvcache.errors", "KvCacheError"),
    ("cluster.chat.errors", "ChatError"),
    ("cluster.demo.errors", "DemoError"),
    ("cluster.launch.errors", "LaunchError"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv` (default: the process's own) and return the exit status."""
    from cluster.cli.app import app

    try:
        app(args=None if argv is None else list(argv), prog_name="kvferry")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else (0 if stop.code is None else 1)
    except KeyboardInterrupt:
        print("kvferry: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if _is_instance(error, "cluster.config.errors", "ConfigError"):
            print(f"kvferry: {error}", file=sys.stderr)
            return 2
        if any(_is_instance(error, module, name) for module, name in _USER_ERRORS):
            print(f"kvferry: {error}", file=sys.stderr)
            return 1
        raise
    return 0


def _is_instance(error: Exception, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None) if loaded is not None else None
    return isinstance(kind, type) and isinstance(error, kind)
