"""What is wrong with a configuration: every problem by itself, and the exception that carries all of them.

Raised by the loader and the checks; the command line prints it and exits with 2. It must never reach a user as a
traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ConfigError", "ConfigProblem"]


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing to change.

    path    dotted path of the key ("" for the file as a whole)
    message what is wrong, with the value found
    remedy  what to write instead
    source  where the value came from: "cluster.yaml:12", "environment KVFERRY_MODEL", "--set model=x", "" for a default
    """

    path: str
    message: str
    remedy: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        head = f"{self.path}{where}: " if self.path else (f"{self.source}: " if self.source else "")
        tail = f" -> {self.remedy}" if self.remedy else ""
        return f"{head}{self.message}{tail}"


class ConfigError(Exception):
    """The configuration cannot be used; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise AssertionError("a ConfigError needs at least one problem")
        count = len(self.problems)
        title = "1 error" if count == 1 else f"{count} errors"
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"configuration: {title}\n{lines}")
