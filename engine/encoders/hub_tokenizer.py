"""A tokenizer of the transformers library under one family's text rules, padded to the full context."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.encoders.base import Tokens
from engine.encoders.hub import not_there, why_unreachable
from engine.encoders.text_rules import Cleaning, EndRule, build_tokens, cut_rows

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.model",
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_tokenizer(who: str, name: str | Path, *, local: bool) -> Any:
    """Load a tokenizer by hub name or from a folder; `local` keeps to files that are on this machine.

    Raises:
        FileNotFoundError: naming the files that a folder lacks.
    """
    if isinstance(name, Path) and not has_tokenizer(name):
        raise FileNotFoundError(
            f"{who}: the tokenizer is missing: {name} holds none of {', '.join(TOKENIZER_FILES)}; copy the "
            "model's tokenizer files there, or name their folder with tokenizer=..."
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(name), local_files_only=local, trust_remote_code=False)


def read_hub_tokenizer(who: str, name: str) -> Any:
    """The tokenizer of a hub repository, from what was fetched before where the hub is out of reach.

    Raises:
        OSError: it is not on this machine and the hub is out of reach.
    """
    reason = why_unreachable()
    try:
        return read_tokenizer(who, name, local=reason is not None)
    except (OSError, ValueError) as error:
        if reason is None:
            raise
        raise not_there(who, f"tokenizer files of {name}", reason, "name their folder with tokenizer=...") from error


class HubTokenizer:
    """Captions to `Tokens` through a transformers tokenizer.

    Args:
        tokenizer: the transformers tokenizer.
        context_length: positions T; every caption is padded to it.
        clean: applied to each caption first (the family's case and punctuation rules).
        end: from ids `(B, T)` to the pooled position `(B,)`.
        blank_separator: separators become 0 after tokenizing, as CLIPA was trained.
    """

    def __init__(
        self,
        tokenizer: Any,
        context_length: int,
        *,
        clean: Cleaning,
        end: EndRule,
        blank_separator: bool = False,
    ) -> None:
        self.source = tokenizer
        self.context_length = context_length
        self.clean, self.end, self.blank_separator = clean, end, blank_separator
        self._separator = tokenizer.sep_token_id if blank_separator else None
        names = (
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "cls_token_id",
            "sep_token_id",
            "mask_token_id",
        )
        ids = {name: getattr(tokenizer, name, None) for name in names}
        self._special = sorted(
            {value for value in ids.values() if value is not None} | ({0} if blank_separator else set())
        )
        self._ends = [value for name, value in ids.items() if name[:3] in ("eos", "sep") and value is not None]
        pad_id = ids["pad_token_id"]
        self._pad = (0 if pad_id is None else pad_id, tokenizer.padding_side)

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokens `(B, context_length)`; a caption that is too long keeps its end token and is flagged."""
        # Without padding and truncation the call changes no state of the tokenizer, so threads may share it.
        encoded = self.source(
            [self.clean(text) for text in texts],
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )
        cut = cut_rows(encoded["input_ids"], self.context_length, self._ends)
        if self._separator is not None:
            for row in cut.rows:
                row[:] = [0 if token == self._separator else token for token in row]
        return build_tokens(
            cut,
            texts,
            context_length=self.context_length,
            pad=self._pad,
            special_ids=self._special,
            end=self.end,
            piece=self.source.convert_ids_to_tokens,
        )

    def digest(self) -> str:
        """Hex digest of the vocabulary."""
        vocabulary = repr(sorted(self.source.get_vocab().items()))
        return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
