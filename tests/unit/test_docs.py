"""The documentation names files, links, commands and settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.cli.app import app
from cluster.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = {path.name for package in ("cluster", "transceiver", "kvcache") for path in (ROOT / package).rglob("*.py")}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_named_in_the_text_exist(page: Path) -> None:
    names = re.findall(r"`([\w/]+\.py)(?:::\w+)?`", page.read_text())
    missing = [name for name in names if not ((ROOT / name).is_file() if "/" in name else name in SOURCES)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_named_in_the_text_exist(page: Path) -> None:
    known = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback is not None}
    known |= {str(group.name) for group in app.registered_groups}
    pattern = r"kvferry (?!is\b|serves\b)([a-z]+(?:-[a-z]+)*)\b(?=[`\s]*(?:[-#`]|$))"
    named = set(re.findall(pattern, page.read_text(), re.MULTILINE))
    assert named - known == set()


def test_the_readme_has_the_commands_and_a_configuration_that_loads(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    path = tmp_path / "cluster.yaml"
    path.write_text(block)
    config = load_config(path)
    assert config.generation_servers.num_instances == 2
    settings = re.findall(r"--set (\S+=\S+)", text)
    assert settings
    load_config(path, settings)
