"""Builds a tokenizer from a GGUF file's metadata (byte-level BPE models)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from cluster.engine.chat_template import ChatTemplate
from cluster.engine.errors import ModelLoadError
from cluster.engine.fast_tokenizer import FastTokenizer

__all__ = ["tokenizer_from_gguf"]

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _pre_tokenizer(name: str, where: str) -> pre_tokenizers.PreTokenizer:
    """The splitter that a GGUF file calls `name`."""
    if name == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _LLAMA3_NAMES:
        split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelLoadError(
        f"{where} uses the pre-tokenizer {name!r}; this engine knows smollm, gpt-2 and llama-bpe: "
        "use the model's Hugging Face folder instead"
    )


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> FastTokenizer:
    """The tokenizer in `metadata`. Raises ModelLoadError for another kind or damaged tables."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelLoadError(
            f"{where} has a tokenizer of kind {kind!r}, only byte-level BPE ('gpt2') is read from GGUF files: "
            "use the model's Hugging Face folder instead"
        )
    name = str(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        if len(types) != len(tokens):
            raise ModelLoadError(f"{where} has {len(types)} token types for {len(tokens)} tokens: the file is damaged")
        eos = int(metadata["tokenizer.ggml.eos_token_id"])
        model = models.BPE(
            {token: index for index, token in enumerate(tokens)}, merges, ignore_merges=name in _LLAMA3_NAMES
        )
    except ModelLoadError:
        raise
    except KeyError as error:
        raise ModelLoadError(f"{where} has no metadata key {error.args[0]!r}: the file is damaged") from error
    except Exception as error:  # the library raises a bare Exception
        raise ModelLoadError(f"{where} has a damaged tokenizer: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(name, where)
    tokenizer.decoder = decoders.ByteLevel()
    for text, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False)])
    source = metadata.get("tokenizer.chat_template")
    template = None
    if isinstance(source, str):
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        bos_text = tokens[bos] if isinstance(bos, int) and bos < len(tokens) else ""
        template = ChatTemplate(source, bos_token=bos_text, eos_token=tokens[eos] if eos < len(tokens) else "")
    return FastTokenizer(tokenizer, len(tokens), frozenset({eos}), template)
