"""Training of PeakPatch on stored features: first the embedding correction alone, then all parts together.

Source: Lu, Chen and Chaterji 2026, "PeakPatch". Ours: one learning rate for both parts, and data that tell true denials
from false ones and ask for right answers of every kind (see `engine.training.negation_data`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from engine.choices import check_numbers
from engine.datasets.captioned import Problem
from engine.encoders.base import EncoderSpec
from engine.encoders.scenes_model import ScenesModelConfig
from engine.engine import Engine
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import Head
from engine.heads.inputs import shortened
from engine.heads.peak_patch import Captions, PeakPatch, PeakPatchConfig
from engine.store import FeatureStore, Manifest
from engine.training.encoded_pictures import encoded_pictures, unread_rows
from engine.training.head_data import SHARD_ROWS, HeadData, Told
from engine.training.heads import BatchLoss, Evaluate, HeadTrainConfig, Report, train_head
from engine.training.losses import contrastive_loss
from engine.training.negation_data import OPTIONS, ROLES, TEXTS, NegationRow
from engine.training.peak_patch_losses import choice_loss, keep_loss, regression_loss


@dataclass(frozen=True)
class NegationData(HeadData):
    """Stored features of N rows: one image and `TEXTS` texts each, `ROLES` first, then the right answer.

    `unread` are rows whose picture cannot be read; `problems` names them. The others are the items.
    """

    texts_per_item: int = TEXTS
    unread: frozenset[int] = frozenset()
    problems: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        if len(self.texts) != TEXTS * len(self.images):
            raise ValueError(
                f"NegationData: texts must come {TEXTS} an image, got {len(self.texts)} for {len(self.images)}"
            )

    def __len__(self) -> int:
        return len(self.images) - len(self.unread)

    def batch(self, items: Tensor) -> tuple[ImageFeatures, TextFeatures]:
        """As `HeadData.batch`, of the rows whose pictures can be read."""
        return super().batch(self.readable[items] if self.unread else items)

    @cached_property
    def readable(self) -> Tensor:
        """The row of each item, int64 `(N,)`."""
        return torch.tensor([row for row in range(len(self.images)) if row not in self.unread])


def head_for(encoder: EncoderSpec, config: PeakPatchConfig) -> PeakPatchConfig:
    """The configuration with the layers that were measured for this encoder, where they were and none were given."""
    if (encoder.family, encoder.text_layers) != ("scenes", ScenesModelConfig().text_layers):
        return config
    known = {name: getattr(SCENES_HEAD, name) for name in ("peak", "anchor", "low") if not getattr(config, name)}
    return replace(config, **known)


def negation_data(
    engine: Engine, needs: Needs, rows: Sequence[NegationRow], folder: Path, *, told: Told | None = None
) -> NegationData:
    """Features of the rows by this engine, computed once into two stores below `folder`.

    The stores' names follow from the encoder and from the pictures as they are, or from needs and texts, so that seeds
    share both, heads of any layers the pictures, and ablations that are given the needs of the whole head the texts.
    `told` is called with (what is being encoded, rows done, rows in all). Raises what `FeatureStore` raises. Pictures
    that cannot be read are left out.
    """
    # Each answer is scored by itself, so their order means nothing: the right one goes first.
    texts = [text for row in rows for text in (*row.texts[: len(ROLES)], *_right_first(row))]
    fingerprint = engine.spec.fingerprint
    contents = {"images": [row.picture() for row in rows], "texts": [str(needs), *texts]}

    def encode_images(start: int, stop: int) -> ImageFeatures:
        return encoded_pictures(engine, Needs(), [row.source for row in rows[start:stop]], stores["images"], start)

    def encode_texts(start: int, stop: int) -> TextFeatures:
        found = shortened(engine.encode_texts(texts[start:stop], scorer=needs))
        return replace(found, token_texts=None, truncated=None, texts=None)

    stores = {}
    for kind, count, encode in (("images", len(rows), encode_images), ("texts", len(texts), encode_texts)):
        source = hashlib.sha256("\n".join([fingerprint, *contents[kind]]).encode()).hexdigest()[:16]
        manifest = Manifest(kind, count, fingerprint, source, shard_rows=SHARD_ROWS)
        stores[kind] = FeatureStore.create(folder / source / kind, manifest)
        told_of = None if told is None else (lambda done, total, kind=kind: told(kind, done, total))
        stores[kind].fill(encode, progress=told_of)
    unread = unread_rows(stores["images"])
    problems = tuple(Problem(str(rows[row].image), reason) for row, reason in sorted(unread.items()))
    return NegationData(stores["images"], stores["texts"], unread=frozenset(unread), problems=problems)


def regression_objective(head: Head, images: ImageFeatures, texts: TextFeatures) -> Tensor:
    """`regression_loss` of a batch: captions with a true denial should move to where they were without it."""
    assert isinstance(head, PeakPatch) and head.ecn is not None
    size = len(images)
    plain, denied = texts[slice(0, size)], texts[slice(size, 2 * size)]
    return regression_loss(head.deltas(denied), plain.embedding.float() - denied.embedding.float())


@dataclass(frozen=True)
class JointObjective:
    """The loss of a batch once the embedding correction has its start.

        contrastive loss (B × 2B) of true captions with false ones as hard negatives
        + cross-entropy of the right answer + penalty · mean(correction²) + keep · (1 − cosine)

    The true caption of each image is, at random, the plain one or the one with a true denial; the false one denies what
    is there. A score correction by itself learns the choice, and the rest where the whole score takes part.

    Attributes:
        scale: what scores are multiplied by in the contrastive loss.
        temperature: what scores are divided by in the choice.
        penalty: weight of the squared corrections of scores.
        keep: weight of `keep_loss`; 0 in the paper, which instead moves the embedding correction very little here.
        whole_score: whether the score correction takes part in the contrastive loss. The paper leaves it out; then it
            is trained on questions alone, and spoils retrieval.
    """

    scale: float = 100.0
    temperature: float = 0.07
    penalty: float = 0.1
    keep: float = 0.0
    whole_score: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, above_zero=("scale", "temperature"), at_least_zero=("penalty", "keep"))

    def __call__(self, head: Head, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """The loss of a batch in the order of `NegationData`."""
        assert isinstance(head, PeakPatch)
        size, v = len(images), images.embedding.float()
        answers = torch.arange(size) + size * torch.arange(len(ROLES), TEXTS)[:, None]  # (OPTIONS, size)
        chosen = [answers.T.flatten()]
        if head.ecn is not None or self.whole_score:
            true = torch.arange(size) + size * (torch.rand(size) < 0.5)
            chosen = [true, torch.arange(size) + 2 * size, *chosen]
        text, low = head.captions(texts[torch.cat(chosen)])
        start = len(text) - OPTIONS * size
        each = (size, OPTIONS)
        own = Captions(text[start:].unflatten(0, each), None if low is None else low[start:].unflatten(0, each))
        right = torch.zeros(size, dtype=torch.int64, device=v.device)
        loss = choice_loss(head.step(v, own), right, temperature=self.temperature, penalty=self.penalty)
        if len(chosen) == 1:
            return loss
        others = Captions(text[:start], low[:start] if low is not None and self.whole_score else None)
        scores = v @ others.text.T if others.low is None else head.step(v, others).scores
        loss = loss + contrastive_loss(self.scale * scores)
        if head.ecn is None or not self.keep:
            return loss
        return loss + self.keep * keep_loss(text[:size], texts.embedding[:size].float())


PAPER = JointObjective()
# For the embedded model, whose logit scale and whose numbers of rows and of steps are smaller.
SCENES = JointObjective(scale=30.0, keep=10.0, whole_score=True)
# The contrast of an added denial is largest in the first layers (`peaksim diagnose layers`), where tokens still stand
# for their own words.
SCENES_HEAD = PeakPatchConfig(peak=2, anchor=5, low=4, dropout=0.2)
SCENES_TRAINING = HeadTrainConfig(
    output=Path("runs/peakpatch"),
    steps=600,
    batch_size=64,
    learning_rate=1e-3,
    weight_decay=0.1,
    warmup_steps=20,
    evaluate_every=200,
)
PRETRAINING_STEPS = 150


def train_peak_patch(
    head: PeakPatch,
    data: NegationData,
    config: HeadTrainConfig,
    *,
    pretraining: HeadTrainConfig | None = None,
    objective: JointObjective = PAPER,
    evaluate: Evaluate | None = None,
    report: Report | None = None,
) -> Path:
    """Train a new head, or go on with one; the file of the trained head, as `train_head` writes it.

    Args:
        head: as `PeakPatch.build` made it and with its readout.
        data: of the encoder the head was built for.
        config: of the joint training; its loss is not used.
        pretraining: of the embedding correction alone, before it; None leaves that out. Its folder must be another one.
        objective: of the joint training.
        evaluate, report: as for `train_head`.

    Raises ValueError for two trainings in one folder, and what `train_head` raises, which a
    run that was begun with another objective, pretraining or other rows is among.
    """
    if pretraining is not None and head.ecn is not None:
        if pretraining.output == config.output:
            raise ValueError(f"train peakpatch: pretraining needs a folder of its own, got {config.output} for both")
        train_head(head, data, pretraining, objective=regression_objective, report=report)
        first = pretraining.deciding()
    else:
        first = None
    loss = BatchLoss(objective, facts=asdict(objective) | {"pretraining": first})
    return train_head(head, data, config, objective=loss, evaluate=evaluate, report=report)


def _right_first(row: NegationRow) -> tuple[str, ...]:
    options = list(row.texts[len(ROLES) :])
    return options.pop(row.correct), *options
