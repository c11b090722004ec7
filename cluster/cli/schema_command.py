"""`kvferry schema`: prints the JSON Schema of the configuration, for editors."""

from __future__ import annotations

__all__ = ["schema"]


def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    import json

    from cluster.config import ClusterConfig

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **ClusterConfig.model_json_schema()}
    print(json.dumps(document, indent=2))
