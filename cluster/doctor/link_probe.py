"""One end of a trial transfer: ``python -m cluster.doctor.link_probe hold|pull CONFIG [TICKET]``, JSON in and out.

`check_link` starts both ends as processes beside each other, as workers are (a parent may read its child's memory where
two siblings may not). Each prints one JSON line, the holder first its ticket; both end by themselves.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import sys
import time

import numpy as np

from kvcache.block_table import BlockTable
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from transceiver import CacheTransceiver, CacheTransceiverConfig, GrantTicket

__all__ = ["main"]

_LAYOUT = KvLayout("link-probe", 32, (LayerGroup(LifeCycleKind.FULL, (0, 1), 4, 64),))  # pages of 128 KiB
_PAGES = 64
_WAIT_S = 20.0


def _table(generation: int) -> BlockTable:
    pages = np.arange(_PAGES, dtype=np.int32)
    return BlockTable(
        0, pages, pages, np.full(_PAGES, generation, np.uint64), np.full(_PAGES, _LAYOUT.tokens_per_block, np.int32)
    )


def _say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def _digest(storage: BytesPageStorage) -> str:
    return hashlib.sha256(b"".join(storage.page(page) for page in range(_PAGES))).hexdigest()


def main(role: str, config_json: str, ticket_json: str = "") -> None:
    """Hold pages for the other end, or pull them from it. Blocks for the transfer."""
    config = CacheTransceiverConfig.model_validate_json(config_json)
    storage = BytesPageStorage(_LAYOUT, [_PAGES], shared=config.wants_shared_pools)
    storage.generations()[:] = 1
    secret = base64.b64decode(json.loads(ticket_json)["secret"]) if ticket_json else secrets.token_bytes(32)
    with CacheTransceiver(worker_id=f"probe-{role}", storage=storage, config=config, secret=secret) as transceiver:
        if role == "hold":
            for page in range(_PAGES):
                storage.page(page)[:] = secrets.token_bytes(_LAYOUT.page_bytes())
            grant = transceiver.publish("probe", (_table(1),), conversation_id=None, scope=b"", lease_s=_WAIT_S)
            _say(
                address=grant.ticket.address, token=base64.b64encode(grant.ticket.token).decode(),
                secret=base64.b64encode(secret).decode(), digest=_digest(storage),
            )  # fmt: skip
            _say(status=grant.future.result(2 * _WAIT_S).status.value)
        else:
            fields = json.loads(ticket_json)
            ticket = GrantTicket(fields["address"], "probe", base64.b64decode(fields["token"]), 0, _PAGES)
            began = time.perf_counter()
            outcome = transceiver.fetch(ticket, (_table(1),), conversation_id=None, scope=b"", timeout_s=_WAIT_S)
            seconds = time.perf_counter() - began
            link = transceiver.stats().links.get(ticket.address)
            _say(
                status=outcome.status.value, reason=outcome.reason, transport=outcome.transport, bytes=outcome.bytes,
                detail=link.detail if link else "", seconds=seconds, equal=_digest(storage) == fields["digest"],
            )  # fmt: skip
    storage.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
