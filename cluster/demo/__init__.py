"""`kvferry demo`: a conversation with a rewind on a real local cluster, checked token for token."""

from __future__ import annotations

from cluster.demo.conversation import ConversationResult, TurnResult, hold_conversation
from cluster.demo.errors import DemoError
from cluster.demo.expectations import ReuseRules, broken_expectations
from cluster.demo.run import DemoOptions, DemoReport, demo_config, run_demo
from cluster.demo.script import DEMO_SCRIPT, DemoScript, DemoTurn
from cluster.demo.turn_row import TurnRow

__all__ = [
    "DEMO_SCRIPT",
    "ConversationResult",
    "DemoError",
    "DemoOptions",
    "DemoReport",
    "DemoScript",
    "DemoTurn",
    "ReuseRules",
    "TurnResult",
    "TurnRow",
    "broken_expectations",
    "demo_config",
    "hold_conversation",
    "run_demo",
]
