"""The state machines of the suite: life cycles, policies, eviction orders, tiers, with room and under pressure."""

from __future__ import annotations

from kvcache import EvictionPolicyName, ReusePolicy
from tests.property.kvcache.actions import Actions

__all__ = ["KINDS", "settings_of"]

ROOM: dict[str, object] = {"pages": 1500, "eviction_possible": False}
TURN_AWARE = EvictionPolicyName.TURN_AWARE
ALL, REQUEST = ReusePolicy.ALL_REUSABLE, ReusePolicy.PER_REQUEST

KINDS: dict[str, dict[str, object]] = {
    "full, pressure": {},
    "full, room": {**ROOM, "exact": True},
    "full, turn_aware": {"pages": 16, "eviction": TURN_AWARE},
    "full, per_request": {"events": 1000, "policy": REQUEST, "pages": 16},
    "full, all_reusable": {"policy": ALL, "pages": 16},
    "full, whole blocks only": {"partial": False, "pages": 16, "events": 1000},
    "reuse off": {"reuse": False},
    "mla and full": {"mla": True, "pages": 16},
    "window, pressure": {"windows": (8,)},
    "window, room": {**ROOM, "windows": (8,)},
    "window, all_reusable, room": {**ROOM, "windows": (8,), "policy": ALL, "exact": True},
    "window, branch snapshots": {"windows": (8,), "branch_snapshot": True, "pages": 20, "eviction": TURN_AWARE},
    "windows without full attention": {"full": False, "windows": (4, 10), "pages": 12},
    "two windows, all_reusable": {"windows": (4, 9), "policy": ALL},
    "recurrent, pressure": {"recurrent": 1, "turns": 3},
    "recurrent, room": {**ROOM, "recurrent": 1, "turns": 3},
    "recurrent, per_request, points": {
        "recurrent": 1,
        "policy": REQUEST,
        "points": {
            "periodic_snapshot_interval": 6,
            "additional_snapshot_offsets_from_start": (3,),
            "additional_snapshot_offsets_from_end": (0, 2),
        },
    },
    "recurrent, all_reusable, turn_aware": {"recurrent": 1, "policy": ALL, "pages": 14, "eviction": TURN_AWARE},
    "recurrent, branch snapshots": {"recurrent": 1, "branch_snapshot": True, "pages": 18},
    "recurrent only": {"full": False, "recurrent": 2, "pages": 8},
    "host tier": {"pages": 14, "events": 1000, "host_bytes": 200},
    "host and disk, all life cycles": {
        "windows": (6,),
        "recurrent": 1,
        "pages": 16,
        "events": 1000,
        "host_bytes": 200,
        "disk_bytes": 400,
    },
    "disk, mla and window, turn_aware": {
        "full": False,
        "mla": True,
        "windows": (6,),
        "pages": 12,
        "events": 1000,
        "disk_bytes": 600,
        "eviction": TURN_AWARE,
    },
    "window and recurrent": {"events": 1000, "windows": (6,), "recurrent": 2, "pages": 20},
}


def settings_of(kind: str) -> type[Actions]:
    """The actions with the settings of a kind."""
    return type("ConfiguredActions", (Actions,), KINDS[kind])
