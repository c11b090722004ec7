"""Two network namespaces with a cable between them: two "hosts" with addresses of their own. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["HOSTS", "NoNamespacesError", "ip", "namespace_pair", "reason_against"]

HOSTS = ("10.213.77.1", "10.213.77.2")


class NoNamespacesError(Exception):
    """This machine does not allow them; the message says why."""


def reason_against() -> str:
    """Why there can be no namespaces here; empty when it is worth a try."""
    if os.geteuid() != 0:
        return "setting up network namespaces needs root"
    return "" if shutil.which("ip") else "needs the ip command"


def ip(*arguments: str) -> None:
    """Run ip(8). Raises CalledProcessError."""
    subprocess.run(("ip", *arguments), check=True, capture_output=True, timeout=20)


@contextmanager
def namespace_pair(label: str = "") -> Iterator[tuple[str, str]]:
    """Names of two namespaces, each with one interface of the same name and an address of HOSTS.

    Raises NoNamespacesError. `label` (up to four letters) tells pairs of one process apart.
    """
    names = (f"kvf{os.getpid() % 10000}{label}a", f"kvf{os.getpid() % 10000}{label}b")
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except (subprocess.CalledProcessError, OSError) as error:
                raise NoNamespacesError(f"this machine does not allow network namespaces: {error}") from error
        try:
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            raise NoNamespacesError(f"no veth pair: {error.stderr.decode(errors='replace').strip()}") from error
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", name)
            ip("-n", name, "link", "set", name, "mtu", "9000", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, timeout=20, check=False)
