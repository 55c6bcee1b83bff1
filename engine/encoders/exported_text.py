"""The tokenizer of an exported model: written into its folder with its rules, and made of them again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.atomic_files import write_text
from engine.encoders.base import Encoder, Tokens
from engine.encoders.hub_tokenizer import HubTokenizer, read_tokenizer
from engine.encoders.open_clip_text import ClipTokenizer, SuffixedTokenizer
from engine.encoders.scenes import WordTokenizer, warn_of_unknown_words
from engine.encoders.settings import read_object
from engine.encoders.text_rules import Cleaning, EndRule, probe

TOKENIZER_FOLDER = "tokenizer"
_WORDS, _PAIRS = "words.json", "bpe.txt.gz"
Tokenizer = WordTokenizer | ClipTokenizer | HubTokenizer | SuffixedTokenizer


def write_tokenizer(who: str, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write a tokenizer's files below `folder/tokenizer`; its rules as plain values.

    Raises ValueError for a tokenizer of another kind.
    """
    target = folder / TOKENIZER_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    suffixed = isinstance(tokenizer, SuffixedTokenizer)
    inner = tokenizer.inner if isinstance(tokenizer, SuffixedTokenizer) else tokenizer
    rules: dict[str, Any] = {"context_length": inner.context_length, "suffixed": suffixed}
    if isinstance(inner, WordTokenizer):
        write_text(target / _WORDS, json.dumps({"words": inner.words}, indent=1))
        return {"kind": "words", **rules, "probe": probe(tokenizer)}
    rules |= {"pool": inner.end.pool, "end_id": inner.end.end_id}
    if isinstance(inner, ClipTokenizer):
        from open_clip.tokenizer import default_bpe

        shutil.copyfile(default_bpe(), target / _PAIRS)
        return {"kind": "clip", **rules, "clean": inner.clean, "probe": probe(tokenizer)}
    if isinstance(inner, HubTokenizer):
        inner.source.save_pretrained(target)
        rules |= {"clean": inner.clean.name, "blank_separator": inner.blank_separator}
        return {"kind": "hub", **rules, "probe": probe(tokenizer)}
    raise ValueError(f"{who}: export knows no way to store a {type(inner).__name__}")


def read_exported_tokenizer(who: str, folder: Path, rules: Mapping[str, Any]) -> Callable[[Sequence[str]], Tokens]:
    """The tokenizer of `write_tokenizer`, which tokenizes as it did then.

    Raises ValueError for another kind, or where this installation reads the files otherwise.
    """
    built = _read(who, folder / TOKENIZER_FOLDER, rules)
    made = SuffixedTokenizer(built) if rules["suffixed"] and not isinstance(built, WordTokenizer) else built
    if probe(made) != rules["probe"]:
        raise ValueError(
            f"{who}: the tokenizer in {folder / TOKENIZER_FOLDER} gives other tokens here than where it was exported; "
            "install the versions of open_clip, transformers and tokenizers it was exported with"
        )
    if isinstance(made, WordTokenizer):
        return _Warning(who, made)
    return made


class _Warning:
    """A word tokenizer that says which words it does not know."""

    def __init__(self, who: str, tokenizer: WordTokenizer) -> None:
        self.who, self.tokenizer = who, tokenizer

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokens as the tokenizer makes them."""
        warn_of_unknown_words(self.who, self.tokenizer, texts)
        return self.tokenizer(texts)


def _read(who: str, place: Path, rules: Mapping[str, Any]) -> WordTokenizer | ClipTokenizer | HubTokenizer:
    length, kind = int(rules["context_length"]), rules["kind"]
    if kind == "words":
        return WordTokenizer(read_object(who, place / _WORDS)["words"], length)
    end = EndRule(rules["pool"], int(rules["end_id"]))
    if kind == "clip":
        return ClipTokenizer(length, end, rules["clean"], vocabulary=place / _PAIRS)
    if kind == "hub":
        source = read_tokenizer(who, place, local=True)
        blank = bool(rules["blank_separator"])
        return HubTokenizer(source, length, clean=Cleaning(rules["clean"]), end=end, blank_separator=blank)
    raise ValueError(f"{who}: the tokenizer must be of kind 'words', 'clip' or 'hub', got {kind!r}")


def tokenizer_of(encoder: Encoder) -> Tokenizer:
    """The tokenizer of an encoder that can be exported. Raises ValueError for an encoder without one."""
    found = getattr(encoder, "tokenizer", None) or getattr(encoder, "_tokenizer", None)
    if not isinstance(found, Tokenizer):
        raise ValueError(f"{encoder.spec.name}: export knows no tokenizer of {type(encoder).__name__}")
    return found
