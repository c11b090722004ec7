"""Renders a model's own chat template in a jinja2 sandbox: a template comes with the weights and is not trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.engine.errors import ModelLoadError

__all__ = ["ChatTemplate"]


def _raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON without HTML escaping."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """One compiled template. Raises ModelLoadError when it is no valid jinja2."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template is not valid jinja2: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt text. Raises ValueError when the template refuses the messages or fails on them."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
