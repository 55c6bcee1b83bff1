"""What each layer of a text tower tells apart, and how near it is to the picture.

With f^l(T) the unit-norm readout (final layer norm and projection) of layer l at the end token, for every kind of
change of a caption T into T',

    LCD(l) = mean over pairs of 1 − ⟨f^l(T), f^l(T')⟩          logical contrast, by layer
    VA(l)  = mean over captions of ⟨f^l(T), f(I)⟩              visual alignment with the caption's own picture

and, since both change with how far apart all captions are at a layer, the controls: pairs that mean the same, pairs
that have nothing in common, and VA minus that with another picture. LCD and VA after Lu, Chen and Chaterji
2026 ("PeakPatch"), whose formulas we could not see: this is our reading. Controls and kinds of change are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.diagnostics.changes import CONTROLS, ChangeSet
from engine.engine import Engine
from engine.features import Needs, TextFeatures, TextReadout
from engine.metrics import Interval, bootstrap_interval
from engine.reference.peak_patch import at_end

NEGATION = "negation"
ALIGNMENT, GAP = "visual alignment", "alignment over chance"
RESAMPLES = 1000


@dataclass(frozen=True)
class Curve:
    """One quantity by layer.

    Attributes:
        name: kind of change, or what is measured of captions with pictures.
        role: `"change"`, `"control"` or `"alignment"`.
        count: pairs it is the mean of.
        values: for each layer, first to last.
    """

    name: str
    role: str
    count: int
    values: tuple[Interval, ...]

    @property
    def means(self) -> tuple[float, ...]:
        """Without the intervals."""
        return tuple(value.value for value in self.values)

    @property
    def top(self) -> int:
        """The 1-indexed layer of the largest mean; the earliest of equals."""
        return 1 + int(np.argmax(self.means))


@dataclass(frozen=True)
class LayerReport:
    """Curves of one text tower.

    Attributes:
        model, fingerprint: of the encoder.
        source: of the captions.
        curves: changes, then controls, then alignment; that over chance where there are two pictures.
        peak, anchor: proposed layers of an embedding correction: where the contrast of negation is largest, and three
            quarters of the way there (the paper's 8 and 6 of 12). 0 where no negation was measured.
        collapse: contrast of negation lost between the peak and the last layer, paired by caption (0 when the last is
            the peak); None where no negation was measured. The peak was chosen on the same pairs, which favours it.
    """

    model: str
    fingerprint: str
    source: str
    curves: tuple[Curve, ...]
    peak: int
    anchor: int
    collapse: Interval | None

    def curve(self, name: str) -> Curve:
        """The curve of a name; KeyError when it was not measured."""
        for curve in self.curves:
            if curve.name == name:
                return curve
        raise KeyError(f"no curve of {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return asdict(self)

    def verdict(self) -> str:
        """In one sentence whether negation's contrast is lost late."""
        if self.collapse is None:
            return "no pairs of kind 'negation' were measured: no layers are proposed"
        contrast = self.curve(NEGATION)
        last, top = contrast.means[-1], contrast.means[self.peak - 1]
        layers = f"proposed peak layer {self.peak}, anchor {self.anchor}"
        if self.collapse.low > 0:
            lost = self.collapse.value / top
            return f"negation's contrast peaks at layer {self.peak} and loses {lost:.0%} of it by the end; {layers}"
        return f"negation's contrast is not lost by the end ({top:.3f} at its peak, {last:.3f} at the end); {layers}"


def diagnose_layers(engine: Engine, data: ChangeSet, *, batch_size: int = 64) -> LayerReport:
    """Curves of the engine's text tower over pairs of captions, and over captions with pictures if there are any.

    Raises ValueError for an encoder whose text layers cannot be read.
    """
    encoder, count = engine.encoder, engine.spec.text_layers
    readout = encoder.text_readout()
    layers = tuple(range(1, count + 1))
    needs = Needs(text_layers=layers)
    curves: list[Curve] = []
    peak, collapse = 0, None
    for kind in data.kinds:
        pairs = [change for change in data.changes if change.kind == kind]
        sides = [
            engine.encode_texts([getattr(pair, side) for pair in pairs], scorer=needs, batch_size=batch_size)
            for side in ("text", "changed")
        ]
        distances = layer_distances(*(layer_embeddings(side, readout, layers) for side in sides))
        curves.append(make_curve(kind, "control" if kind in CONTROLS else "change", distances))
        if kind == NEGATION:
            peak = curves[-1].top
            lost = distances[peak - 1] - distances[-1]
            collapse = bootstrap_interval(lost.double().numpy(), resamples=RESAMPLES)
    if data.images:
        pictures = engine.encode_images(list(data.images), batch_size=batch_size)
        texts = engine.encode_texts(list(data.captions), scorer=needs, batch_size=batch_size)
        embeddings, found = layer_embeddings(texts, readout, layers), pictures.embedding.cpu()
        own, gap = alignments(embeddings, found, other_pictures(data.captions, data.images))
        curves.append(make_curve(ALIGNMENT, "alignment", own))
        if gap.shape[1]:
            curves.append(make_curve(GAP, "alignment", gap))
    spec = engine.spec
    anchor = max(1, round(peak * 6 / 8)) if peak else 0
    return LayerReport(spec.name, spec.fingerprint, data.source, tuple(curves), peak, anchor, collapse)


def layer_embeddings(texts: TextFeatures, readout: TextReadout, layers: Sequence[int]) -> Tensor:
    """Readouts at the end token `(layers, B, D)`, unit norm, on the CPU. The features must hold these layers."""
    end = texts.end
    if end is None:
        raise ValueError("layer_embeddings: texts must hold end, got None; encode them with encode_texts")
    return torch.stack([readout.embed(at_end(texts.hidden[layer], end)).cpu() for layer in layers])


def layer_distances(first: Tensor, second: Tensor) -> Tensor:
    """`1 − cosine` `(layers, n)` of unit vectors `(layers, n, D)`."""
    return 1 - (first * second).sum(-1)


def alignments(texts: Tensor, images: Tensor, others: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cosines `(layers, n)` of captions `(layers, n, D)` with their own images `(n, D)`, and those over chance.

    Chance is the cosine with the image of row `others[k]`, see `other_pictures`. Captions that have none, -1, are
    not among the second ones `(layers, m)`.
    """
    own = (texts * images).sum(-1)
    row = torch.tensor(others)
    some = row >= 0
    return own, own[:, some] - (texts[:, some] * images[row[some]]).sum(-1)


def other_pictures(captions: Sequence[str], images: Sequence[Path | np.ndarray]) -> list[int]:
    """For each caption and its picture the row of another picture, that this caption does not have; -1 for none.

    It is the next one in the order in which pictures first appear, after the last the first. Paths that are equal are
    one picture, arrays always several.

    >>> other_pictures(["a", "b", "b", "c"], [Path("1"), Path("1"), Path("2"), Path("3")])
    [2, 3, 3, 0]
    """
    rows: dict[Path | int, int] = {}
    places: list[int] = []
    own: dict[str, set[int]] = {caption: set() for caption in captions}
    for row, (caption, image) in enumerate(zip(captions, images, strict=True)):
        places.append(rows.setdefault(image if isinstance(image, Path) else row, row))
        own[caption].add(places[-1])
    distinct = list(rows.values())
    number = {place: k for k, place in enumerate(distinct)}

    def other(caption: str, place: int) -> int:
        following = (distinct[(number[place] + step) % len(distinct)] for step in range(1, len(distinct)))
        return next((found for found in following if found not in own[caption]), -1)

    return [other(caption, place) for caption, place in zip(captions, places, strict=True)]


def make_curve(name: str, role: str, values: Tensor) -> Curve:
    """The curve of values `(layers, n)`, each layer's mean with its 95 % bootstrap interval over n."""
    rows = values.double().numpy()
    return Curve(name, role, rows.shape[1], tuple(bootstrap_interval(row, resamples=RESAMPLES) for row in rows))
