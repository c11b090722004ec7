"""What goes wrong between a client and a server, in words for the person at the terminal."""

from __future__ import annotations

__all__ = ["ChatError"]


class ChatError(Exception):
    """The server cannot be reached or refused the request; the message says which and what to do."""
