"""Where a recurrent model's state is kept inside a prompt: pure arithmetic over the configuration."""

from __future__ import annotations

from kvcache.config import RecurrentStateConfig

__all__ = ["snapshot_points"]


def snapshot_points(config: RecurrentStateConfig, prompt_tokens: int) -> tuple[int, ...]:
    """Positions (tokens) within the prompt, increasing; empty when no point is configured or none fits."""
    points = {at for at in config.additional_snapshot_offsets_from_start if at <= prompt_tokens}
    points.update(prompt_tokens - back for back in config.additional_snapshot_offsets_from_end if back < prompt_tokens)
    if config.periodic_snapshot_interval:
        points.update(range(config.periodic_snapshot_interval, prompt_tokens + 1, config.periodic_snapshot_interval))
    return tuple(sorted(points))
