"""Two network namespaces with a cable between them: two "hosts" on one machine, for measuring TCP."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["NamespacesUnavailable", "TwoHosts", "two_hosts"]

_HOSTS = ("10.213.79.1", "10.213.79.2")


class NamespacesUnavailable(Exception):
    """This machine or user cannot make network namespaces; the message says why."""


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """Names of the namespaces and the address in each."""

    names: tuple[str, str]
    hosts: tuple[str, str]


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(("ip", *arguments), check=True, capture_output=True, text=True, timeout=20)
    except subprocess.CalledProcessError as error:
        raise NamespacesUnavailable(f"ip {' '.join(arguments[:3])}: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NamespacesUnavailable(f"ip: {error}") from error


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make them, take them down afterwards. Raises NamespacesUnavailable."""
    if os.geteuid() != 0:
        raise NamespacesUnavailable("network namespaces need root")
    if shutil.which("ip") is None:
        raise NamespacesUnavailable("network namespaces need the ip command")
    one, two = (f"kvb{os.getpid() % 100000}{side}" for side in "ab")
    try:
        for name in (one, two):
            _ip("netns", "add", name)
        _ip("link", "add", one, "netns", one, "type", "veth", "peer", "name", two, "netns", two)
        for name, host in zip((one, two), _HOSTS, strict=True):
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "mtu", "9000", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield TwoHosts((one, two), _HOSTS)
    finally:
        for name in (one, two):
            subprocess.run(("ip", "netns", "del", name), capture_output=True, timeout=20, check=False)
