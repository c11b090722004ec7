"""The generated reference and manifest are current and complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.config.reference import generated_files, main, manifest

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("name", sorted(generated_files()))
def test_the_committed_file_is_what_the_models_say(name: str) -> None:
    path = ROOT / name
    assert path.is_file(), f"{name} is missing: run `make docs`"
    assert path.read_text(encoding="utf-8") == generated_files()[name], f"{name} is stale: run `make docs`"


def test_the_manifest_names_every_path_of_the_tree() -> None:
    def leaves(value: object, prefix: str) -> list[str]:
        if isinstance(value, dict) and value:
            return [path for key, item in value.items() for path in leaves(item, f"{prefix}.{key}" if prefix else key)]
        return [prefix]

    missing = set(leaves(ClusterConfig().model_dump(mode="json"), "")) - set(manifest())
    sections = {path for path in missing if any(other.startswith(f"{path}.") for other in manifest())}
    assert missing == sections


def test_every_key_is_described() -> None:
    text = generated_files()["docs/configuration.md"]
    assert not [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]


def test_the_manifest_is_plain_json_with_role_defaults() -> None:
    data = json.loads(generated_files()["tests/data/config_manifest.json"])
    assert data["generation_servers.router.type"]["default"] == "kv_cache_aware"
    assert data["context_servers.router.type"]["default"] == "conversation"
    assert data["cache_transceiver_config.kv_transfer_timeout_ms"]["default"] == 60000


def test_check_writes_nothing_and_a_wrong_argument_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert "current" in capsys.readouterr().out
    assert main(["--wrong"]) == 2
