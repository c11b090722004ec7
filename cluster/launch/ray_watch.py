"""A small program beside a job's first node that tells which nodes of the Ray cluster live, one JSON line a change.

Run as `python -m cluster.launch.ray_watch HOST:PORT` by `RayLauncher`, so that Ray is imported in no other process of
the launcher. It asks the head's control store, which exists before any node is a member; it ends when its stdin closes.
"""

from __future__ import annotations

import json
import sys
import threading

__all__ = ["main"]

_POLL_S = 0.5
_ALIVE = 0


def main(address: str) -> int:
    """Print `{"alive": [ip, ...]}` whenever it changes, `{"waiting": why}` while the head does not answer."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    closed = threading.Event()
    threading.Thread(target=_wait_for_end_of_input, args=(closed,), daemon=True).start()
    client: GcsClient | None = None
    last = ""
    while not closed.wait(_POLL_S):
        try:
            if client is None:
                client = GcsClient(address=address)
            nodes = client.get_all_node_info().values()
        except Exception as error:  # Ray raises its own kinds while the head is not up: say so and ask again
            client = None
            line = json.dumps({"waiting": f"{type(error).__name__}: {str(error)[:200]}"})
        else:
            alive = sorted(node.node_manager_address for node in nodes if node.state == _ALIVE)
            line = json.dumps({"alive": alive})
        if line != last:
            print(line, flush=True)
            last = line
    return 0


def _wait_for_end_of_input(closed: threading.Event) -> None:
    sys.stdin.read()
    closed.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
