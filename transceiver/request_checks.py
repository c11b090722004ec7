"""What a holder checks of a request before it honours it: token, identity, receiver, size. Pure."""

from __future__ import annotations

import hmac

from transceiver.messages import PullRequest
from transceiver.publication import Publication

__all__ = ["request_problem"]


def request_problem(
    publication: Publication, request: PullRequest, worker_id: str, *, busy: bool, max_blocks: int
) -> tuple[str, str] | None:
    """(field, reason) of a request by `worker_id` that must be refused, or None. `busy`: the grant is being pulled."""
    if not hmac.compare_digest(publication.ticket.token, request.token):
        return "token", "the token does not belong to this grant"
    if publication.conversation != request.conversation:
        return "conversation", "the grant belongs to another conversation"
    if publication.scope != request.scope:
        return "scope", "the grant belongs to another reuse scope"
    if publication.receiver is not None and publication.receiver != worker_id:
        return "receiver", "the grant belongs to another worker"
    if busy:
        return "transfer_id", "another receiver is pulling this grant"
    if sum(len(g.ordinals) for g in request.groups) > max_blocks:
        return "groups", "more blocks than max_blocks_per_pull"
    return None
