"""The session's virtual Slurm cluster; skips with the reason where it cannot exist."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.virtual_nodes import NamespaceMachines
from tests.slurm.virtual_slurm import VirtualSlurm, missing_programs

NODES = 4
GPUS_PER_NODE = 2


def require_slurm() -> None:
    """Skip when the Debian packages are missing and cannot be expected."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"needs the packages slurmctld slurmd slurm-client munge; missing programs: {', '.join(missing)}")


@pytest.fixture(scope="session")
def slurm_root() -> Iterator[Path]:
    """A folder whose path every user may walk (munge runs as its own user)."""
    root = Path(tempfile.mkdtemp(prefix="kvferry-slurm-"))
    root.chmod(0o755)
    yield root
    if os.environ.get("KVFERRY_KEEP_SLURM"):
        print(f"kept: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm(slurm_root: Path) -> Iterator[VirtualSlurm]:
    """Four nodes and a controller, shared by the whole session. A test that crashes a node boots it again."""
    require_slurm()
    cluster = VirtualSlurm(slurm_root, NODES, gpus=GPUS_PER_NODE)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def separate_nodes(slurm: VirtualSlurm) -> VirtualSlurm:
    """The cluster, where its nodes have addresses and process lists of their own."""
    if not isinstance(slurm.machines, NamespaceMachines):
        pytest.skip("needs root and network namespaces: without them every virtual node has the same address")
    return slurm
