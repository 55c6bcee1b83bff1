"""From token ids to `Tokens`: which positions are words, where a caption ends, what a cut made equal."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.encoders.base import Tokens

# What each kind of tokenizer does to a caption. The sentences are part of an encoder's fingerprint.
WORD_RULES = "lower case, words only (punctuation dropped), cut keeping the end token; causal, so padding is inert"
CLIP_RULES = "lower case, cleaned (ftfy, HTML entities, blanks); start and end token; zeros to the full length"
HF_CLIP_RULES = "lower case; start and end token; padded to the full length, which the causal tower does not see"
SIGLIP_RULES = "lower case, punctuation dropped; end token; padded to the full length, which takes part"
SIGLIP2_RULES = "lower case; end token; padded to the full length, which takes part"
LOWER_RULES = "lower case; padded to the full length"
BLANKS_RULES = "case kept, blanks joined; padded to the full length"

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
POOLS = ("first", "last", "argmax", "eos")
# Read through a tokenizer, these tell case, punctuation, accents, numbers and special tokens apart.
_PROBES = ("A photo of two Red cats, not a DOG's!", "naïve café_42", "左 of   <b>", "")


@dataclass(frozen=True)
class Cut:
    """Captions as rows of ids, cut to the context length, not yet padded; `truncated`: which were cut."""

    rows: list[list[int]]
    truncated: list[bool]


def cut_rows(rows: Sequence[Sequence[int]], context_length: int, end_ids: Sequence[int]) -> Cut:
    """Cut rows that are too long; the end token of a cut row stays its last token."""
    kept, truncated = [], []
    for row in rows:
        too_long = len(row) > context_length
        if too_long and row[-1] in end_ids:
            row = [*row[: context_length - 1], row[-1]]
        kept.append(list(row[:context_length]))
        truncated.append(too_long)
    return Cut(kept, truncated)


def build_tokens(
    cut: Cut,
    texts: Sequence[str],
    *,
    context_length: int,
    pad: tuple[int, str],
    special_ids: Sequence[int],
    end: Callable[[Tensor], Tensor],
    piece: Callable[[int], str],
) -> Tokens:
    """`Tokens` of cut rows, padded to the context length.

    Args:
        cut: ids of each caption.
        texts: the captions.
        context_length: positions T of the result.
        pad: the padding id and the side it goes to, `"right"` or `"left"`.
        special_ids: ids that are no word wherever they stand (start, end, padding, separators).
        end: from ids `(B, T)` to the position `(B,)` whose state becomes the global embedding.
        piece: the text of one id.
    """
    pad_id, side = pad
    ids = torch.full((len(cut.rows), context_length), pad_id, dtype=torch.int64)
    attention = torch.zeros(ids.shape, dtype=torch.bool)
    for number, row in enumerate(cut.rows):
        where = slice(0, len(row)) if side == "right" else slice(context_length - len(row), context_length)
        ids[number, where] = torch.tensor(row, dtype=torch.int64)
        attention[number, where] = True
    words = attention & ~torch.isin(ids, torch.tensor(list(special_ids), dtype=torch.int64))
    shown = {number: piece(number) for number in set(ids.flatten().tolist())}
    return Tokens(
        ids=ids,
        attention_mask=attention,
        word_mask=words,
        end=end(ids),
        truncated=torch.tensor(cut.truncated, dtype=torch.bool),
        texts=tuple(texts),
        token_texts=tuple(tuple(shown[number] for number in row) for row in ids.tolist()),
    )


def end_positions(ids: Tensor, pool: str, end_id: int) -> Tensor:
    """Position `(B,)` of `ids (B, T)` that a text tower pools: `first`, `last`, `argmax` (of ids) or `eos`.

    Raises ValueError for another kind of pooling.
    """
    if pool == "first":
        return torch.zeros(len(ids), dtype=torch.int64)
    if pool == "last":
        return torch.full((len(ids),), ids.shape[1] - 1, dtype=torch.int64)
    if pool == "argmax":
        return ids.argmax(dim=-1)
    if pool == "eos":
        return (ids == end_id).int().argmax(dim=-1)
    raise ValueError(f"text tower: pooling must be 'first', 'last', 'argmax' or 'eos', got {pool!r}")


@dataclass(frozen=True)
class EndRule:
    """Which position of `ids (B, T)` a text tower pools; see `end_positions`."""

    pool: str
    end_id: int = 0

    def __call__(self, ids: Tensor) -> Tensor:
        return end_positions(ids, self.pool, self.end_id)


@dataclass(frozen=True)
class Cleaning:
    """What is done to a caption before it is split, by a name that can be stored.

    `"none"`; `"lower"`; `"siglip"` (punctuation dropped, lower case, blanks joined); `"open_clip:<name>"`, one of
    open_clip's own. Raises ValueError for another name when it is called.
    """

    name: str

    def __call__(self, text: str) -> str:
        if self.name.startswith("open_clip:"):
            # Imported here: open_clip takes seconds, and other families do without it.
            from open_clip.tokenizer import get_clean_fn

            return get_clean_fn(self.name.removeprefix("open_clip:"))(text)
        if self.name not in _CLEANINGS:
            known = ", ".join(map(repr, _CLEANINGS))
            raise ValueError(f"text rules: cleaning must be {known} or 'open_clip:<name>', got {self.name!r}")
        return _CLEANINGS[self.name](text)


def _canonical(text: str) -> str:
    """SigLIP's training text. Its own tokenizer does the same, one that stands in for it may not."""
    return " ".join(text.translate(_NO_PUNCTUATION).lower().split())


_CLEANINGS: dict[str, Callable[[str], str]] = {"none": str, "lower": str.lower, "siglip": _canonical}


def find_equal_after_cut(tokens: Tokens) -> list[list[int]]:
    """Rows of different captions that the cut to the context length made equal, each group in order of rows.

    Of rows that are the same string the first stands for all. Ids are compared, not their texts: the pieces of
    "cat dog" and of "catdog" may read alike.
    """
    groups: dict[tuple[int, ...], dict[str, int]] = {}
    for row, ids in enumerate(map(tuple, tokens.ids.tolist())):
        groups.setdefault(ids, {}).setdefault(tokens.texts[row], row)
    truncated = tokens.truncated.tolist()
    rows = (list(group.values()) for group in groups.values())
    return [group for group in rows if len(group) > 1 and any(truncated[row] for row in group)]


def probe(tokenize: Callable[[Sequence[str]], Tokens]) -> str:
    """Hex digest of what a tokenizer does to a few telling texts; part of an encoder's fingerprint."""
    tokens = tokenize(_PROBES)
    facts = repr((tokens.ids.tolist(), tokens.word_mask.tolist(), tokens.end.tolist()))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
