"""Text rules of open_clip's model families: CLIP's byte-pair tokenizer and the tokenizers of the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.encoders.base import Tokens
from engine.encoders.hub_tokenizer import HubTokenizer, has_tokenizer, read_hub_tokenizer, read_tokenizer
from engine.encoders.text_rules import (
    BLANKS_RULES,
    CLIP_RULES,
    LOWER_RULES,
    POOLS,
    SIGLIP_RULES,
    Cleaning,
    EndRule,
    build_tokens,
    cut_rows,
)

_HUB_RULES = {"canonicalize": SIGLIP_RULES, "lower": LOWER_RULES, "whitespace": BLANKS_RULES}


@cache
def _byte_pairs(clean: str, vocabulary: Path | None) -> Any:
    """open_clip's tokenizer, read once: it keeps nothing of a model but a cache of words."""
    from open_clip.tokenizer import SimpleTokenizer, default_bpe

    return SimpleTokenizer(str(vocabulary or default_bpe()), clean=clean)


class ClipTokenizer:
    """CLIP's byte-pair tokenizer. Positions: start, word pieces, end, zeros.

    `vocabulary` is the file of its byte pairs; None takes the one that open_clip ships.
    """

    def __init__(
        self, context_length: int, end: EndRule, clean: str = "lower", *, vocabulary: Path | None = None
    ) -> None:
        self.source = _byte_pairs(clean, vocabulary)
        self.context_length = context_length
        self.clean = clean
        self.rules = CLIP_RULES if clean == "lower" else _HUB_RULES[clean]
        self.end = end

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokens `(B, context_length)`; a caption that is too long keeps its end token and is flagged."""
        start, end = self.source.sot_token_id, self.source.eot_token_id
        rows = [[start, *self.source.encode(text), end] for text in texts]
        return build_tokens(
            cut_rows(rows, self.context_length, (end,)),
            texts,
            context_length=self.context_length,
            pad=(0, "right"),
            special_ids=(start, end),
            end=self.end,
            piece=self._piece,
        )

    def digest(self) -> str:
        """The vocabulary is one file of the package; its size tells versions apart."""
        return f"clip-bpe-{self.source.vocab_size}"

    def _piece(self, number: int) -> str:
        return self.source.decoder[number].removesuffix("</w>")


class SuffixedTokenizer:
    """Another tokenizer's positions and one more at the end, where CoCa's text tower puts its class token."""

    def __init__(self, inner: ClipTokenizer | HubTokenizer) -> None:
        self.inner = inner
        self.source = inner.source
        self.rules = "then the tower's own class token"

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokens `(B, context_length + 1)`; the last id is a placeholder that the tower never sees."""
        tokens = self.inner(texts)
        extra = torch.zeros(len(texts), 1, dtype=torch.int64)
        return Tokens(
            ids=torch.cat([tokens.ids, extra], dim=1),
            attention_mask=torch.cat([tokens.attention_mask, extra == 0], dim=1),
            word_mask=torch.cat([tokens.word_mask, extra != 0], dim=1),
            end=torch.full((len(texts),), tokens.ids.shape[1], dtype=torch.int64),
            truncated=tokens.truncated,
            texts=tokens.texts,
            token_texts=tuple((*row, "<class>") for row in tokens.token_texts),
        )

    def digest(self) -> str:
        """As the inner tokenizer's."""
        return self.inner.digest()


def build_tokenizer(
    who: str, model: Any, text_cfg: Mapping[str, Any], *, folder: Path | None, chosen: Path | None
) -> tuple[ClipTokenizer | HubTokenizer | SuffixedTokenizer, str]:
    """The tokenizer of a model and its rules in one sentence.

    Args:
        who: the model's name, for errors.
        model: the open_clip model.
        text_cfg: its text configuration.
        folder: where a local checkpoint lies; then nothing is fetched. None for tags and hub names.
        chosen: tokenizer folder given by the user.

    Raises:
        FileNotFoundError: naming the missing files.
        ValueError: a tokenizer option this engine does not know.
    """
    text = getattr(model, "text", model)
    # Hugging Face text towers pool on their own (first position or a mean) and have no end of this kind.
    pool = getattr(text, "pool_type", None) or getattr(model, "text_pool_type", "first")
    end_id = getattr(text, "eos_id", None) or getattr(model, "text_eos_id", 0)

    end = EndRule(pool if pool in POOLS else "first", int(end_id or 0))

    options = dict(text_cfg.get("tokenizer_kwargs") or {})
    context_length = int(text_cfg.get("context_length", 77))
    hub_name = text_cfg.get("hf_tokenizer_name")
    if text_cfg.get("tokenizer_mode") or set(options) - {"clean", "strip_sep_token"}:
        unknown = sorted(set(options) - {"clean", "strip_sep_token"}) or [text_cfg["tokenizer_mode"]]
        raise ValueError(f"{who}: tokenizer option {unknown[0]!r} is not supported")
    built: ClipTokenizer | HubTokenizer
    if hub_name:
        clean = options.get("clean", "whitespace")
        source = _find_hub_tokenizer(who, hub_name, folder, chosen)
        built = _hub_tokenizer(source, context_length, clean, end, blank=bool(options.get("strip_sep_token")))
        rules = _HUB_RULES[clean]
    else:
        if chosen is not None:
            raise ValueError(f"{who}: tokenizer={str(chosen)!r} was given, but this model uses CLIP's own tokenizer")
        built = ClipTokenizer(context_length, end, options.get("clean", "lower"))
        rules = built.rules
    if getattr(text, "cls_emb", None) is not None:
        suffixed = SuffixedTokenizer(built)
        return suffixed, f"{rules}; {suffixed.rules}"
    return built, rules


def _hub_tokenizer(
    source: Any, context_length: int, clean: str, end: EndRule, *, blank: bool
) -> HubTokenizer:
    cleaning = Cleaning(f"open_clip:{clean}")
    return HubTokenizer(source, context_length, clean=cleaning, end=end, blank_separator=blank)


def _find_hub_tokenizer(who: str, hub_name: str, folder: Path | None, chosen: Path | None) -> Any:
    """The given folder, else the checkpoint's own, else the hub's (for local checkpoints: its cache)."""
    if chosen is not None:
        return read_tokenizer(who, chosen, local=True)
    if folder is not None and has_tokenizer(folder):
        return read_tokenizer(who, folder, local=True)
    if folder is None:
        return read_hub_tokenizer(who, hub_name)
    try:
        return read_tokenizer(who, hub_name, local=True)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{who}: the tokenizer is missing: neither {folder} nor the local cache holds that of "
            f"{hub_name}; copy its tokenizer.json there, or name its folder with tokenizer=..."
        ) from error
