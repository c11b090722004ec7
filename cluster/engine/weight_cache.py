"""The folder where converted weights are kept: content-addressed, built once a machine, shared by every process.

`KVFERRY_CACHE_DIR` names it, the default is ~/.cache/kvferry. Entries appear by atomic rename under a file lock, so any
number of processes may ask for the same one at once, and a process that dies half way leaves nothing that is ever read.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.engine.errors import ModelLoadError

__all__ = ["WeightCache", "cache_directory", "file_digest"]

_LOG = logging.getLogger(__name__)
_POLL_S = 0.1


def cache_directory() -> Path:
    """`KVFERRY_CACHE_DIR`, or the kvferry folder in the user's cache (XDG_CACHE_HOME or ~/.cache)."""
    named = os.environ.get("KVFERRY_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"


def file_digest(path: Path, directory: Path | None = None) -> str:
    """SHA-256 (hex) of a file's bytes, remembered in the cache by path, size, inode and modification time.

    Reads the whole file the first time. Raises ModelLoadError when it cannot be read.
    """
    try:
        stat = path.stat()
        identity = f"{path.resolve()}|{stat.st_size}|{stat.st_ino}|{stat.st_mtime_ns}"
        note = (directory or cache_directory()) / "digests" / hashlib.sha256(identity.encode()).hexdigest()
        if note.is_file():
            known = note.read_text()
            if len(known) == 64:
                return known
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"cannot read the model file {path}: {error}") from error
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as draft:
            draft.write(digest)
        os.replace(draft.name, note)
    except OSError as error:
        _LOG.info("the digest of %s is not remembered (%s): it is computed anew each time", path, error)
    return digest


class WeightCache:
    """Entries (folders) under one root. Safe for several processes."""

    def __init__(
        self, root: Path | None = None, *, lock_timeout_s: float = 600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root or cache_directory()
        self._lock_timeout_s = lock_timeout_s
        self._clock = clock

    def get(self, key: str, is_complete: Callable[[Path], bool], build: Callable[[Path], None]) -> Path:
        """The folder of `key`; `build` fills a new one unless it is there and `is_complete`.

        Blocks while another process builds it. Raises ModelLoadError when the cache cannot be written or the other
        process does not finish within the lock's time-out.
        """
        entry = self._root / key
        if is_complete(entry):
            return entry
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with self._locked(key):
                if is_complete(entry):
                    return entry
                for left_over in (entry, *self._root.glob(f"{key}.part-*")):
                    shutil.rmtree(left_over, ignore_errors=True)
                draft = Path(tempfile.mkdtemp(prefix=f"{key}.part-", dir=self._root))
                try:
                    build(draft)
                    os.replace(draft, entry)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
        except OSError as error:
            raise ModelLoadError(
                f"cannot write converted weights to {self._root}: {error}; free some space there or set "
                "KVFERRY_CACHE_DIR to a writable folder"
            ) from error
        return entry

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        deadline = self._clock() + self._lock_timeout_s
        with (self._root / f"{key}.lock").open("w") as lock:
            told = False
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._clock() > deadline:
                        raise ModelLoadError(
                            f"another process has held {lock.name} for {self._lock_timeout_s:.0f} s while converting "
                            "the model: stop it and try again"
                        ) from None
                    if not told:
                        _LOG.info("waiting for another process to convert the model (%s)", lock.name)
                        told = True
                    time.sleep(_POLL_S)
            yield
