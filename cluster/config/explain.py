"""Turns pydantic's errors into problems that say what to write instead.

Called by the loader with the models' errors. Drops the copies of an error that the server sections inherited.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.config.errors import ConfigProblem
from cluster.config.fields import allowed_values, model_at, walk_fields

__all__ = ["explain", "nearest"]

# Names of other systems and older places -> where the value belongs here.
_MOVED = {
    "hostname": "server.host",
    "free_gpu_memory_fraction": "kv_cache_config.free_memory_fraction",
    "tp_size": "context_servers.tensor_parallel_size",
    "pp_size": "context_servers.pipeline_parallel_size",
}
_WANTED = {
    "int_type": "an integer without quotes",
    "int_from_float": "an integer without a fraction",
    "int_parsing": "an integer",
    "float_type": "a number without quotes",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping of keys and values, or leave the key out",
    "model_attributes_type": "a mapping of keys and values, or leave the key out",
    "dict_type": "a mapping of keys and values",
    "list_type": "a list",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
# What null would have meant, where a key has no null.
_NOT_NULL = {
    "kv_transfer_timeout_ms": "every transfer needs a time limit: write milliseconds, such as 60000",
}
_PATTERNS = {"device": "write auto, cpu, cuda or cuda:N"}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when nothing is near."""
    choices = list(known)
    lowered = {choice.lower(): choice for choice in choices}
    for cutoff_word in (word.lower(), word.lower().replace("-", "_")):
        if found := difflib.get_close_matches(cutoff_word, list(lowered), n=1, cutoff=0.6):
            return lowered[found[0]]
    return None


def explain(
    error: ValidationError, root: type[BaseModel], inherited: Iterable[str], where: Callable[[str], str]
) -> list[ConfigProblem]:
    """One problem for each of pydantic's errors, in their order.

    `inherited` names the sections (such as ``context_servers``) that repeat the top level's values: an error there
    that the top level has too is reported once, at the top. `where` gives the source of a path.
    """
    details = error.errors(include_url=False)
    top = {(_dotted(detail["loc"]), detail["type"], detail["msg"]) for detail in details}
    roles = set(inherited)
    problems: list[ConfigProblem] = []
    for detail in details:
        loc = detail["loc"]
        if loc and loc[0] in roles and (_dotted(loc[1:]), detail["type"], detail["msg"]) in top:
            continue
        problems.append(_problem(detail, root, where))
    return problems


def _dotted(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc)


def _problem(detail: ErrorDetails, root: type[BaseModel], where: Callable[[str], str]) -> ConfigProblem:
    loc, kind, value = detail["loc"], detail["type"], detail.get("input")
    path = _dotted(loc)
    source = where(path)
    context: dict[str, Any] = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return ConfigProblem(path, "unknown key", _remedy_for_unknown(loc, root), source)
    if value is None and loc and (remedy := _NOT_NULL.get(str(loc[-1]))):
        return ConfigProblem(path, "null is not allowed", remedy, source)
    if allowed := _allowed_at(loc, root):
        close = nearest(value, allowed) if isinstance(value, str) else None
        hint = f" (did you mean {close}?)" if close and close != value else ""
        return ConfigProblem(path, f"{value!r} is not a choice", f"write one of: {', '.join(allowed)}{hint}", source)
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return ConfigProblem(path, f"{_show(value)} is out of range", f"write {words} {context[name]}", source)
    if kind == "missing":
        return ConfigProblem(path, "the key is missing", "add it", source)
    if kind in _WANTED:
        return ConfigProblem(path, f"{_show(value)} has the wrong type", f"write {_WANTED[kind]}", source)
    if kind == "string_pattern_mismatch":
        remedy = _PATTERNS.get(str(loc[-1])) or f"it must match {context['pattern']}"
        return ConfigProblem(path, f"{value!r} is not understood", remedy, source)
    if kind == "string_too_short":
        return ConfigProblem(path, "the text is empty", "write a value or leave the key out", source)
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    shown = "" if isinstance(value, dict) or repr(value) in message else f"{_show(value)}: "
    return ConfigProblem(path, f"{shown}{message}", "", source)


def _show(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _allowed_at(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, ...] | None:
    parent = model_at(root, loc[:-1])
    info = parent.model_fields.get(str(loc[-1])) if parent is not None and loc else None
    return None if info is None else allowed_values(info.annotation)


def _remedy_for_unknown(loc: tuple[int | str, ...], root: type[BaseModel]) -> str:
    key = str(loc[-1])
    parent = model_at(root, loc[:-1])
    if key in _MOVED:
        return f"write it as {_MOVED[key]}"
    siblings = [] if parent is None else list(parent.model_fields)
    if close := nearest(key, siblings):
        return f"did you mean {_dotted((*loc[:-1], close))}?"
    elsewhere = [field.path for field in walk_fields(root) if field.path.rpartition(".")[2] == key]
    if elsewhere:
        return f"it belongs at {min(elsewhere, key=lambda path: path.count('.'))}"
    if leaf := nearest(key, {field.path.rpartition(".")[2] for field in walk_fields(root)}):
        matches = [field.path for field in walk_fields(root) if field.path.rpartition(".")[2] == leaf]
        return f"did you mean {min(matches, key=lambda path: path.count('.'))}?"
    return f"remove it; known here: {', '.join(siblings)}" if siblings else "remove it"
