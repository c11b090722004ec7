"""Rules that concern several keys or both roles at once: what `kvferry check` looks at beyond each key by itself.

Called by `kvferry check` and before serving. Takes the merged tree and, when known, the model's description; pure but
for reading the key file's existence. It must never load weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from cluster.config.cluster_config import INHERITED_SECTIONS, ROLE_SECTIONS, ClusterConfig
from cluster.config.errors import ConfigProblem
from cluster.config.server_section import ServerSectionConfig
from kvcache.config import ReusePolicy

__all__ = ["ModelLimits", "check_cluster", "config_warnings"]

_Finding = tuple[str, str, str]  # path below the section, message, remedy
_LOOPBACK = ("127.", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the checks need to know of a model: longest sequence, KV heads of each layer group, layers."""

    max_position: int
    num_kv_heads: tuple[int, ...]
    num_layers: int


def check_cluster(config: ClusterConfig, limits: ModelLimits | None = None) -> list[ConfigProblem]:
    """Everything that keeps this cluster from working; empty when nothing does."""
    by_role = {role: _check_role(getattr(config, role), limits) for role in ROLE_SECTIONS}
    problems = [ConfigProblem(path, message, remedy) for path, message, remedy in _once(by_role)]
    problems += _check_pair(config)
    keys = config.server.api_keys_file
    if keys is not None and not os.access(keys, os.R_OK):
        problems.append(
            ConfigProblem("server.api_keys_file", f"the file {keys} cannot be read", "correct the path or write null")
        )
    return problems


def _once(by_role: dict[str, list[_Finding]]) -> list[_Finding]:
    """The findings with full paths; what both roles inherited from the top level is told once, with its path there."""
    shared = [
        finding
        for finding in by_role[ROLE_SECTIONS[0]]
        if finding[0].partition(".")[0] in INHERITED_SECTIONS and finding in by_role[ROLE_SECTIONS[1]]
    ]
    own = [
        (f"{role}.{path}", message, remedy)
        for role, findings in by_role.items()
        for path, message, remedy in findings
        if (path, message, remedy) not in shared
    ]
    return shared + own


def _check_role(section: ServerSectionConfig, limits: ModelLimits | None) -> list[_Finding]:
    engine, cache = section.engine, section.kv_cache_config
    found: list[_Finding] = []

    def refuse(path: str, message: str, remedy: str) -> None:
        found.append((path, message, remedy))

    if cache.max_tokens is not None and engine.max_seq_len > cache.max_tokens:
        refuse(
            "engine.max_seq_len",
            f"a sequence of {engine.max_seq_len} tokens does not fit a pool of {cache.max_tokens}",
            f"write at most {cache.max_tokens}, or raise kv_cache_config.max_tokens",
        )
    if engine.max_num_tokens < engine.max_batch_size:
        refuse(
            "engine.max_num_tokens",
            f"{engine.max_num_tokens} tokens a step cannot decode {engine.max_batch_size} sequences",
            f"write at least max_batch_size ({engine.max_batch_size})",
        )
    if not engine.enable_chunked_prefill and engine.max_num_tokens < engine.max_seq_len:
        refuse(
            "engine.enable_chunked_prefill",
            f"without it a prompt longer than max_num_tokens ({engine.max_num_tokens}) can never be computed",
            f"write true, or lower max_seq_len ({engine.max_seq_len}) to max_num_tokens",
        )
    transceiver = section.cache_transceiver_config
    policy = cache.block_reuse_config.policy
    if transceiver.enable_pipelined_transfer and cache.enable_block_reuse and policy != ReusePolicy.ALL_REUSABLE:
        refuse(
            "cache_transceiver_config.enable_pipelined_transfer",
            f"prompt chunks cannot be sent ahead when the policy {policy.value} publishes them at the prompt's end",
            "write false, or kv_cache_config.block_reuse_config.policy: all_reusable",
        )
    tensor, pipeline = section.tensor_parallel_size, section.pipeline_parallel_size
    for heads in sorted(set(limits.num_kv_heads)) if limits is not None else ():
        if heads % tensor and tensor % heads:
            refuse(
                "tensor_parallel_size",
                f"{heads} KV heads cannot be divided among {tensor} ranks",
                f"write a divisor or a multiple of {heads}",
            )
    if limits is not None and pipeline > limits.num_layers:
        refuse("pipeline_parallel_size", f"the model has {limits.num_layers} layers", "write at most that many")
    for name, size in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", pipeline)):
        if size > 1:
            refuse(name, f"the engine runs a model on one rank, not on {size}", "write 1; use num_instances for more")
    return found


def _check_pair(config: ClusterConfig) -> list[ConfigProblem]:
    context, generation = config.context_servers, config.generation_servers
    found: list[ConfigProblem] = []
    for path in ("kv_cache_config.tokens_per_block", "engine.dtype", "cache_transceiver_config.backend"):
        section, _, key = path.partition(".")
        ours, theirs = (getattr(getattr(side, section), key) for side in (context, generation))
        if ours != theirs:
            found.append(
                ConfigProblem(
                    f"generation_servers.{path}",
                    f"{_plain(theirs)} here, but {_plain(ours)} in context_servers: blocks cannot be exchanged",
                    f"write the same {key} for both, best at the top level",
                )
            )
    if config.conditional_disagg_config.max_local_prefill_length > 0 and generation.router.type != "kv_cache_aware":
        found.append(
            ConfigProblem(
                "conditional_disagg_config.max_local_prefill_length",
                f"prefill on the generation side needs to know what is cached there, but its router is "
                f"{generation.router.type}",
                "write generation_servers.router.type: kv_cache_aware, or 0 here",
            )
        )
    return found


def config_warnings(config: ClusterConfig, limits: ModelLimits | None = None) -> list[str]:
    """What is allowed but will not do what it seems to; one sentence each, the path first."""
    by_role = {role: _role_warnings(getattr(config, role), limits) for role in ROLE_SECTIONS}
    found = [f"{path}: {message}" for path, message, _ in _once(by_role)]
    context, generation = config.context_servers, config.generation_servers
    if context.engine.max_seq_len != generation.engine.max_seq_len:
        found.append(
            f"engine.max_seq_len: {context.engine.max_seq_len} for context_servers and "
            f"{generation.engine.max_seq_len} for generation_servers; the smaller one decides"
        )
    if not config.server.host.startswith(_LOOPBACK) and config.server.api_keys_file is None:
        found.append(
            f"server.host: {config.server.host} is open to the network and server.api_keys_file is null; "
            f"anybody who reaches the port is served"
        )
    return found


def _role_warnings(section: ServerSectionConfig, limits: ModelLimits | None) -> list[_Finding]:
    found: list[_Finding] = []
    engine = section.engine
    if limits is not None and "max_seq_len" in engine.model_fields_set and engine.max_seq_len > limits.max_position:
        message = f"the model ends at {limits.max_position} tokens, which holds instead of {engine.max_seq_len}"
        found.append(("engine.max_seq_len", message, ""))
    reuse = section.kv_cache_config.block_reuse_config
    if "max_num_turns" in reuse.model_fields_set and reuse.policy != ReusePolicy.PER_CONVERSATION:
        message = f"{reuse.max_num_turns} has no effect with policy {reuse.policy.value}, only with per_conversation"
        found.append(("kv_cache_config.block_reuse_config.max_num_turns", message, ""))
    if not section.kv_cache_config.enable_block_reuse and section.router.type in ("kv_cache_aware", "conversation"):
        message = f"{section.router.type} has nothing to follow while kv_cache_config.enable_block_reuse is false"
        found.append(("router.type", message, ""))
    return found


def _plain(value: object) -> str:
    return str(getattr(value, "value", value))
