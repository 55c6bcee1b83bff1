"""Features made once for several scorers: one pass over the pictures for each way of cropping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from engine.engine import Engine
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.images import ImageSource
from engine.scorers.base import Scorer

# Told (what is being done, how many, of how many).
Told = Callable[[str, int, int], None]


def features_for(
    engine: Engine,
    pictures: Sequence[ImageSource],
    captions: Sequence[str],
    scorers: Mapping[str, Scorer],
    *,
    segments: Sequence[Sequence[str]] | None = None,
    progress: Told | None = None,
) -> Iterator[tuple[str, ImageFeatures, TextFeatures]]:
    """For each scorer its name and features of all pictures and captions that meet its needs.

    Scorers that can share features get the same objects: pictures are encoded once for each crop plan (and
    tap), captions are split and encoded once for each segment template. Image features of one plan are made
    when the first scorer that needs them comes, and only those of one plan are held.

    Arguments: ``segments``, for each caption its own in place of the segmenter's; ``progress`` is told of the
    passes over the pictures. Raises what ``Engine.encode_images`` and ``encode_texts`` raise.
    """
    groups = shared_needs(scorers)
    text_groups = shared_needs(scorers, texts_alone=True)
    texts = {
        name: encoded
        for names, needs in text_groups
        for encoded in (engine.encode_texts(captions, scorer=needs, segments=segments),)
        for name in names
    }
    whole = len(groups) * len(pictures)
    for number, (names, needs) in enumerate(groups):
        what, before = ", ".join(names), number * len(pictures)

        def told(done: int, _: int, what: str = what, before: int = before) -> None:
            if progress is not None:
                progress(what, before + done, whole)

        images = engine.encode_images(pictures, scorer=needs, progress=told)
        for name in names:
            yield name, images, texts[name]


def shared_needs(scorers: Mapping[str, Scorer], *, texts_alone: bool = False) -> list[tuple[tuple[str, ...], Needs]]:
    """The fewest sets of needs, each with the scorers it serves, in order of first appearance.

    >>> from engine.scorers.registry import get_scorer
    >>> [names for names, _ in shared_needs({name: get_scorer(name) for name in ("global", "sgi")})]
    [('global', 'sgi')]
    """
    groups: list[tuple[tuple[str, ...], Needs]] = []
    for name, scorer in scorers.items():
        needs = scorer.needs()
        if texts_alone:
            needs = Needs(
                tokens=needs.tokens,
                segments=needs.segments,
                segment_template=needs.segment_template,
                text_layers=needs.text_layers,
            )
        for place, (names, held) in enumerate(groups):
            both = _joined(held, needs)
            if both is not None:
                groups[place] = ((*names, name), both)
                break
        else:
            groups.append(((name,), needs))
    return groups


def _joined(a: Needs, b: Needs) -> Needs | None:
    """Needs that meet both, None where they exclude each other."""
    same_regions = a.regions is None or b.regions is None or a.regions == b.regions
    same_tap = not (a.patches and b.patches) or (a.tap, a.aligned) == (b.tap, b.aligned)
    same_template = not (a.segments and b.segments) or a.segment_template == b.segment_template
    if not (same_regions and same_tap and same_template):
        return None
    patched, split = a if a.patches else b, a if a.segments else b
    return replace(
        patched,
        tokens=a.tokens or b.tokens,
        regions=a.regions or b.regions,
        segments=split.segments,
        segment_template=split.segment_template,
        image_layers=tuple(sorted({*a.image_layers, *b.image_layers})),
        text_layers=tuple(sorted({*a.text_layers, *b.text_layers})),
    )
