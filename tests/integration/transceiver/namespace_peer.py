"""One side of a transfer between two "hosts": run with ``ip netns exec NAME python -m ...namespace_peer``.

``holder HOST`` prints a ticket as JSON, serves it, and prints the outcome and a digest of the pages.
``receiver HOST TICKET`` pulls and prints the same. Both end by themselves within a minute.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from typing import Any

from tests.unit.transceiver.rig import SCOPE, SECRET, make_layout, make_storage, table
from transceiver import CacheTransceiver, CacheTransceiverConfig, GrantTicket

PAGES = (3, 1, 2, 9)
CONFIG = CacheTransceiverConfig.model_validate({"backend": os.environ.get("PEER_BACKEND", "ucx"), "ucx_tls": "tcp"})


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def digest(storage: Any, pages: tuple[int, ...]) -> str:
    return hashlib.sha256(b"".join(bytes(storage.page(page)) for page in pages)).hexdigest()


def main(role: str, host: str, ticket_text: str = "") -> None:
    storage = make_storage(make_layout(), (16,), fill=7 if role == "holder" else None)
    transceiver = CacheTransceiver(worker_id=role, storage=storage, config=CONFIG, secret=SECRET, host=host)
    with transceiver:
        if role == "holder":
            publication = transceiver.publish("t", (table(PAGES),), conversation_id=None, scope=SCOPE, lease_s=40)
            ticket = publication.ticket
            say(address=ticket.address, transfer_id="t", token=base64.b64encode(ticket.token).decode())
            outcome, pages = publication.future.result(60), PAGES
        else:
            fields = json.loads(ticket_text)
            fields["token"] = base64.b64decode(fields["token"])
            pages = (4, 5, 6, 7)
            pull = transceiver.pull(
                GrantTicket(num_tokens=0, num_blocks=0, **fields), (table(pages),),
                conversation_id=None, scope=SCOPE, timeout_s=20,
            )  # fmt: skip
            outcome = pull.future.result(30)
        say(
            status=outcome.status.value,
            reason=outcome.reason,
            transport=outcome.transport,
            digest=digest(storage, pages),
        )
    storage.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
