"""Every path of the configuration with its type, default and description, read off the models.

The one source of the generated reference, of the manifest and of the suggestions for misspelt keys. Pure reading.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = ["ConfigField", "allowed_values", "model_at", "walk_fields"]


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One leaf (or section) of the tree. `default` is JSON-like, of no meaning when `is_required` or for a section."""

    path: str
    type: str
    default: Any
    description: str
    is_section: bool
    is_required: bool = False


def walk_fields(model: type[BaseModel], prefix: str = "") -> Iterator[ConfigField]:
    """All fields below `model`, depth first, in the order of the models."""
    for name, info in model.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        inner = _submodel(info.annotation)
        description = " ".join((info.description or "").split())
        if inner is not None:
            yield ConfigField(path, "section", None, description, True)
            yield from walk_fields(inner, path)
        else:
            yield ConfigField(path, _type_text(info), _plain_default(info), description, False, info.is_required())


def model_at(model: type[BaseModel], keys: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The model that describes the mapping at `keys`, or None when there is none."""
    current: type[BaseModel] | None = model
    for key in keys:
        if current is None:
            return None
        info = current.model_fields.get(str(key))
        current = None if info is None else _submodel(info.annotation)
    return current


def allowed_values(annotation: Any) -> tuple[str, ...] | None:
    """The values of an enum or literal type (possibly optional), or None when it is neither."""
    if typing.get_origin(annotation) is Literal:
        return tuple(str(value) for value in typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(str(member.value) for member in annotation)
    for part in typing.get_args(annotation):
        if (values := allowed_values(part)) is not None:
            return values
    return None


def _submodel(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in typing.get_args(annotation):
        if (inner := _submodel(part)) is not None:
            return inner
    return None


def _plain_default(info: FieldInfo) -> Any:
    if info.is_required():
        return None
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Enum):
        return value.value
    return list(value) if isinstance(value, tuple | frozenset) else value


def _type_text(info: FieldInfo) -> str:
    text = _annotation_text(info.annotation)
    limits = [limit for item in info.metadata if (limit := _limit_text(item))]
    return f"{text}, {', '.join(limits)}" if limits else text


def _limit_text(item: Any) -> str:
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        value = getattr(item, attribute, None)
        if value is not None:
            return f"{sign} {value}"
    return ""


def _annotation_text(annotation: Any) -> str:
    if values := _own_values(annotation):
        return " | ".join(values)
    if annotation is type(None):
        return "null"
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        limits = [limit for item in metadata if (limit := _limit_text(item))]
        return f"{_annotation_text(base)}, {', '.join(limits)}" if limits else _annotation_text(base)
    if origin in (Union, types.UnionType):
        return " | ".join(_annotation_text(part) for part in typing.get_args(annotation))
    if origin in (list, tuple, set, frozenset):
        parts = [part for part in typing.get_args(annotation) if part is not Ellipsis]
        return "list of " + " | ".join(dict.fromkeys(_annotation_text(part) for part in parts))
    if origin is dict:
        key, value = typing.get_args(annotation)
        return f"mapping of {_annotation_text(key)} to {_annotation_text(value)}"
    names = {bool: "true | false", int: "integer", float: "number", str: "text"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _own_values(annotation: Any) -> tuple[str, ...] | None:
    if typing.get_origin(annotation) is Literal or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return allowed_values(annotation)
    return None
