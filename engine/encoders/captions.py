"""Captions and their segments to features, encoding every distinct string once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.encoders.base import Encoder, Progress
from engine.encoders.inputs import check_text
from engine.encoders.text_rules import find_equal_after_cut
from engine.features import Needs, TextFeatures
from engine.segments import Segment, Segmenter

# Sentences a label is put into: the embedded model and CLIP-like encoders have all seen their kind.
TEMPLATES = ("{}", "a photo of {}", "a picture of {}", "an image of {}")

# Rows that a warning names before it only counts.
NAMED_ROWS = 5


@dataclass(frozen=True)
class CaptionSegments:
    """The segments of several captions.

    Attributes:
        texts: words of each caption's segments.
        negated: for each segment, whether it stands under a negation.
        segmenter: what split the captions; empty when the user gave the segments.
    """

    texts: tuple[tuple[str, ...], ...]
    negated: tuple[tuple[bool, ...], ...]
    segmenter: str = ""

    @staticmethod
    def of(parts: Sequence[Sequence[str | Segment]], segmenter: str = "") -> CaptionSegments:
        """The segments of each caption, as `Segment` objects or as words, which are not negated.

        Raises TypeError naming the caption for what is no list, or no list of words.
        """
        texts, negated = [], []
        for row, segments in enumerate(parts):
            if isinstance(segments, str):
                raise TypeError(f"encode_texts: segments of text {row} must be a list, got one string {segments!r}")
            if not isinstance(segments, Sequence):
                raise TypeError(f"encode_texts: segments of text {row} must be a list, got {type(segments).__name__}")
            texts.append(tuple(_words(row, place, part) for place, part in enumerate(segments)))
            negated.append(tuple(isinstance(part, Segment) and part.negated for part in segments))
        return CaptionSegments(tuple(texts), tuple(negated), segmenter)

    @staticmethod
    def split(captions: Sequence[str], segmenter: Segmenter) -> CaptionSegments:
        """The segments of each caption by a segmenter; every distinct caption is split once."""
        distinct = list(dict.fromkeys(captions))
        parts = dict(zip(distinct, segmenter.segment(distinct), strict=True))
        return CaptionSegments.of([parts[text] for text in captions], segmenter.name)


def _words(row: int, place: int, part: object) -> str:
    """The words of one segment of text `row`."""
    words = part.text if isinstance(part, Segment) else part
    if not isinstance(words, str):
        raise TypeError(
            f"encode_texts: segment {place} of text {row} must be a string or a Segment, got {type(words).__name__}"
        )
    check_text("encode_texts", f"segment {place} of text {row}", words)
    return words


def encode_captions(
    encoder: Encoder,
    texts: Sequence[str],
    needs: Needs,
    *,
    segments: CaptionSegments | None = None,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> TextFeatures:
    """Features of captions, in order, with what `needs` asks for.

    Each distinct caption and each distinct segment (put into `needs.segment_template`) is encoded once.
    A caption or segment that was cut is named in a UserWarning, and so are those that became equal by the cut.

    Raises what `Encoder.encode_texts` raises, and ValueError when segments are needed and not given, or
    not given for every caption.
    """
    if needs.segments and segments is None:
        raise ValueError("encode_texts: segments are needed, got none; give them or a segmenter")
    if segments is not None and len(segments.texts) != len(texts):
        raise ValueError(
            f"encode_texts: segments must be given for each of {len(texts)} texts, got {len(segments.texts)}"
        )
    captions = list(dict.fromkeys(texts))
    phrases: list[str] = []
    if segments is not None:
        phrases = list(dict.fromkeys(part for parts in segments.texts for part in parts))
    done = _Sum(progress, len(captions) + len(phrases))
    features = encoder.encode_texts(
        captions,
        token_vectors=needs.tokens,
        layers=needs.text_layers,
        batch_size=batch_size,
        progress=done.part(),
    )
    row_of = {text: row for row, text in enumerate(captions)}
    if len(captions) != len(texts):
        features = features[[row_of[text] for text in texts]]
    _report_cuts(encoder, features, "text", list(map(str, range(len(texts)))), texts)
    if segments is None:
        return features
    vectors = features.embedding[:1]
    if phrases:
        sentences = [needs.segment_template.replace("{}", phrase) for phrase in phrases]
        found = encoder.encode_texts(sentences, batch_size=batch_size, progress=done.part())
        _report_cuts(encoder, found, "segment", _places(segments, phrases), phrases)
        vectors = found.embedding
    return _with_segments(features, segments, vectors, phrases, needs.segment_template)


def label_prompts(
    encoder: Encoder, labels: Sequence[str], templates: Sequence[str], *, batch_size: int = 64
) -> TextFeatures:
    """One row for each label: the normalised mean of the embeddings of its sentences, one for each template.

    `{}` in a template stands for the label (prompt ensembling after Radford et al. 2021, CLIP).

    Raises:
        ValueError: no label, the same label twice, or a template without `{}`.
        TypeError: a label or template that is no string, templates that are one.
    """
    names = [labels] if isinstance(labels, str) else list(labels)
    if isinstance(templates, str):
        raise TypeError(f"classify: templates must be a list of strings, got one string {templates!r}")
    for kind, given in (("label", names), ("template", templates)):
        for row, text in enumerate(given):
            check_text("classify", f"{kind} {row}", text)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"classify: labels must be distinct and at least one, got {names}")
    if not templates or any("{}" not in template for template in templates):
        raise ValueError(f"classify: every template must hold {{}}, where the label goes, got {list(templates)}")
    sentences = [template.replace("{}", name) for name in names for template in templates]
    features = encoder.encode_texts(sentences, batch_size=batch_size)
    _report_cut_labels(encoder, features, names)
    mean = features.embedding.unflatten(0, (len(names), len(templates))).mean(dim=1)
    return TextFeatures(functional.normalize(mean, dim=-1), texts=tuple(names), fingerprint=features.fingerprint)


def _with_segments(
    features: TextFeatures, segments: CaptionSegments, vectors: Tensor, phrases: Sequence[str], template: str
) -> TextFeatures:
    row_of = {phrase: row for row, phrase in enumerate(phrases)}
    # One column at least, so that captions without any segment still have a tensor, all of it masked.
    width = max(1, *(len(parts) for parts in segments.texts))
    index = torch.zeros(len(features), width, dtype=torch.int64)
    mask = torch.zeros(len(features), width, dtype=torch.bool)
    negated = torch.zeros(len(features), width, dtype=torch.bool)
    for row, (parts, flags) in enumerate(zip(segments.texts, segments.negated, strict=True)):
        index[row, : len(parts)] = torch.tensor([row_of[part] for part in parts], dtype=torch.int64)
        mask[row, : len(parts)] = True
        negated[row, : len(parts)] = torch.tensor(flags, dtype=torch.bool)
    device = vectors.device
    mask = mask.to(device)
    return replace(
        features,
        segments=vectors[index.to(device)] * mask[..., None],
        segment_mask=mask,
        segment_texts=segments.texts,
        segment_negated=negated.to(device),
        segmenter=segments.segmenter,
        segment_template=template,
    )


def _places(segments: CaptionSegments, phrases: Sequence[str]) -> list[str]:
    """Where each phrase stands first, in words."""
    first: dict[str, str] = {}
    for row, parts in enumerate(segments.texts):
        for place, part in enumerate(parts):
            first.setdefault(part, f"{place} of text {row}")
    return [first[phrase] for phrase in phrases]


def _report_cuts(
    encoder: Encoder, features: TextFeatures, kind: str, names: Sequence[str], words: Sequence[str]
) -> None:
    """Warn of captions or segments longer than the model's context, and of those that the cut made equal.

    `names` and `words` are those of the rows of `features`; the words stand without their template.
    """
    if features.truncated is None or not bool(features.truncated.any()):
        return
    rows = features.truncated.nonzero().flatten().tolist()
    shown = ", ".join(f"{names[row]} ({_short(words[row])})" for row in rows[:NAMED_ROWS])
    more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
    message = f"encode_texts: longer than the model's context and cut: {kind} {shown}{more}"
    found = _equal_after_cut(encoder, features, rows)
    if found:
        groups = ", ".join(f"[{', '.join(names[row] for row in group)}]" for group in found[:NAMED_ROWS])
        message += f"; equal after the cut, so they score alike: {kind}s {groups}"
    warnings.warn(message, UserWarning, stacklevel=4)


def _report_cut_labels(encoder: Encoder, features: TextFeatures, labels: Sequence[str]) -> None:
    """Warn of labels one of whose sentences is longer than the model's context, in the words of the labels.

    `features` are those of the sentences, as many for each label in turn.
    """
    if features.truncated is None or not bool(features.truncated.any()):
        return
    templates = len(features) // len(labels)
    rows = features.truncated.nonzero().flatten().tolist()
    cut = list(dict.fromkeys(row // templates for row in rows))
    shown = ", ".join(f"{label} ({_short(labels[label])})" for label in cut[:NAMED_ROWS])
    more = f" and {len(cut) - NAMED_ROWS} more" if len(cut) > NAMED_ROWS else ""
    message = f"classify: longer than the model's context and cut: label {shown}{more}"
    # Each template may make the same labels equal; a label's own sentences may well become one.
    found = dict.fromkeys(
        tuple(dict.fromkeys(row // templates for row in group)) for group in _equal_after_cut(encoder, features, rows)
    )
    alike = [list(group) for group in found if len(group) > 1]
    if alike:
        message += f"; sentences of theirs are equal after the cut: labels {', '.join(map(str, alike[:NAMED_ROWS]))}"
    warnings.warn(message, UserWarning, stacklevel=4)


def _equal_after_cut(encoder: Encoder, features: TextFeatures, rows: list[int]) -> list[list[int]]:
    """Groups of rows of different texts that the cut made equal; `rows` are those that were cut."""
    if features.token_texts is not None:
        # A caption that just fits may equal one that was cut; only the suspects are tokenized again.
        cut = {features.token_texts[row] for row in rows}
        rows = [row for row, pieces in enumerate(features.token_texts) if pieces in cut]
    assert features.texts is not None  # encoders state them
    found = find_equal_after_cut(encoder.tokenize([features.texts[row] for row in rows]))
    return [[rows[place] for place in group] for group in found]


def _short(text: str, length: int = 40) -> str:
    return repr(text if len(text) <= length else text[: length - 1] + "…")


class _Sum:
    """One count of progress over several calls."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._before, self._last = progress, total, 0, 0

    def part(self) -> Progress | None:
        """The progress of the next call."""
        if self._progress is None:
            return None
        self._before = self._last
        return self._advance

    def _advance(self, done: int, _: int) -> None:
        self._last = self._before + done
        assert self._progress is not None
        self._progress(self._last, self._total)
