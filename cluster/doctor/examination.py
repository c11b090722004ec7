"""`examine`: all of the doctor's checks for one configuration, in the order they are reported."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config import ClusterConfig
from cluster.doctor.finding import Finding, Verdict
from cluster.doctor.link_check import check_link, check_live_links
from cluster.doctor.machine_check import check_memory, check_port, check_ptrace, check_shared_memory
from cluster.doctor.package_check import check_ownership, check_packages, check_python
from cluster.doctor.ucx_check import check_ucx

__all__ = ["examine"]


def examine(config: ClusterConfig) -> Iterator[Finding]:
    """Findings as they are made; each check takes seconds at most. Never raises for what it finds."""
    yield from check_python()
    yield from check_packages()
    yield from check_ownership()
    yield from check_memory()
    yield from check_shared_memory()
    yield from check_ucx()
    yield from check_ptrace()
    yield from check_link(config.cache_transceiver_config)
    yield from check_live_links(config.server.host, config.server.port)
    yield from check_port(config.server.host, config.server.port)
    yield _check_model(config)


def _check_model(config: ClusterConfig) -> Finding:
    from cluster.engine import describe_model
    from cluster.engine.errors import EngineError

    try:
        model = describe_model(config.model, config.kv_cache_config.tokens_per_block)
    except EngineError as error:
        return Finding("model", Verdict.FAIL, str(error), "correct `model` in the configuration")
    page = model.layout.page_bytes()
    return Finding(
        "model", Verdict.OK, f"{config.model}: up to {model.max_position} tokens, {page} bytes of KV a block"
    )
