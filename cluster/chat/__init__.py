"""Talking to a running kvferry server: a small streaming client and the terminal chat on top of it."""

from __future__ import annotations

from cluster.chat.answer import Answer, KvUsage
from cluster.chat.errors import ChatError
from cluster.chat.kvferry_client import KvferryClient
from cluster.chat.terminal_chat import TerminalChat

__all__ = ["Answer", "ChatError", "KvUsage", "KvferryClient", "TerminalChat"]
