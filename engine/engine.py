"""The engine: a frozen encoder and the scorers over it, from image files and captions to scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias, get_args

import torch
from torch import Tensor

from engine.choices import Backend, check_choice, check_flag
from engine.encoders.base import Encoder, EncoderSpec, Progress
from engine.encoders.captions import TEMPLATES, CaptionSegments, encode_captions, label_prompts
from engine.encoders.exported import ExportedEncoder
from engine.encoders.inputs import as_texts, check_batch_size, check_regions
from engine.encoders.outputs import Output, as_output, check_output
from engine.encoders.progress import reporting
from engine.encoders.registry import load_encoder
from engine.encoders.sources import (
    Boxes,
    OnError,
    as_list,
    blocks_of,
    encode_pictures,
    encoded_batches,
    names_of,
    none_read,
    report_failures,
)
from engine.encoders.taps import aligned_taps
from engine.features import Features, ImageFeatures, Needs, TextFeatures
from engine.forks import OwnLock, one_thread_after_fork
from engine.heads.base import Head
from engine.images import ImageFailure, ImageSource, decode
from engine.scorers.base import Scorer, check_finite
from engine.scorers.explanation import Explanation
from engine.scorers.exported_heads import exported_head
from engine.scorers.learned import HeadScorer
from engine.scorers.registry import get_scorer
from engine.segments import Segment, Segmenter, get_segmenter

Images: TypeAlias = "ImageFeatures | ImageSource | Sequence[ImageSource]"
Texts: TypeAlias = "TextFeatures | str | Sequence[str]"


class Engine:
    """A frozen encoder with scorers over it. May be used from several threads.

    Args:
        encoder: what makes the features.
        segmenter: what splits captions into segments, a name or an object of `engine.segments`; it is made when
            a scorer first needs it.
        backend: of the ops, for scorers that name none; None chooses by device. Unknown names raise ValueError.

    Example:
        >>> import engine
        >>> from PIL import Image
        >>> peaksim = engine.load("scenes")
        >>> picture = Image.new("RGB", (96, 96), "red")
        >>> tuple(peaksim.score([picture], ["a red square", "a blue circle"], scorer="max_sim").shape)
        (1, 2)
    """

    def __init__(
        self, encoder: Encoder, *, segmenter: str | Segmenter = "auto", backend: Backend | None = None
    ) -> None:
        _check_options(segmenter, backend)
        self.encoder = encoder
        self.backend = backend
        self._segmenter = segmenter
        self._lock = OwnLock()
        self._heads: dict[str, Head | None] = {}

    @property
    def spec(self) -> EncoderSpec:
        """Facts about the encoder."""
        return self.encoder.spec

    @property
    def segmenter(self) -> Segmenter:
        """What splits captions into segments."""
        with self._lock:
            if isinstance(self._segmenter, str):
                self._segmenter = get_segmenter(self._segmenter)
            return self._segmenter

    def score(
        self,
        images: Images,
        texts: Texts,
        *,
        scorer: str | Scorer = "global",
        pairs: bool = False,
        output: Output = "similarity",
        batch_size: int = 64,
        progress: bool | Progress = False,
    ) -> Tensor:
        """Scores of images against texts, float32 `(n_images, n_texts)` on the CPU; `(n,)` for pairs.

        Args:
            images: one or many of path, encoded bytes, PIL image, numpy array and tensor, or `ImageFeatures`.
            texts: one or many captions, or `TextFeatures` (`encode_texts` takes segments of your own).
            scorer: a name or a `Scorer` object with its options.
            pairs: score image i with text i alone.
            output: `"similarity"`; `"logit"` = scale · similarity + bias of the checkpoint, which was fitted
                to the global cosine: of other scorers it is the same affine map and no calibrated logit;
                `"probability"`, as the checkpoint was trained: softmax of an image's logits over the texts, or
                the sigmoid of each.
            batch_size: images, crops or texts in one pass of the encoder. Pictures are held a batch at a time.
            progress: True shows a bar, a function is called with (images done, images in all).

        Raises:
            ImageError: a picture cannot be read.
            ValueError: nothing to score, an unknown option, a batch size below 1, features of another encoder or
                without what the scorer needs, pairs of unequal number, the softmax of pairs, or a score that is not
                finite.
        """
        check_flag("score", "pairs", pairs)
        check_output("score", self.spec, output, pairs=pairs)
        check_batch_size("score", batch_size)
        chosen = self.scorer(scorer)
        text_features = self._texts(texts, chosen, batch_size)
        sources = self._own(images) if isinstance(images, ImageFeatures) else as_list(images)
        names = sources.ids if isinstance(sources, ImageFeatures) else names_of(sources)
        if pairs and len(sources) != len(text_features):
            raise ValueError(
                f"score: pairs need as many images as texts, got {len(sources)} images and {len(text_features)} texts"
            )
        scores = torch.empty((len(sources),) if pairs else (len(sources), len(text_features)))
        needs = self._needs(chosen)
        with one_thread_after_fork():
            for start, block in blocks_of(self.encoder, sources, needs, batch_size=batch_size, progress=progress):
                rows = slice(start, start + len(block))
                partners = text_features[rows] if pairs else text_features
                chosen.check(block, partners, aligned_taps=aligned_taps(self.spec))
                values = chosen.pairs(block, partners) if pairs else chosen.matrix(block, partners)
                check_finite(chosen.name, values, text_features, names, start)
                scores[rows] = values
            return as_output(self.spec, scores, output)

    def encode_images(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        scorer: str | Scorer | Needs = "global",
        regions: Boxes | None = None,
        batch_size: int = 64,
        progress: bool | Progress = False,
        on_error: OnError = "raise",
        ids: Sequence[str] | None = None,
    ) -> ImageFeatures:
        """Features of images, with what a scorer needs.

        Args:
            images: as for `score`.
            scorer: whose needs are met; a `Needs` names them one by one.
            regions: for each image its own rectangles `(R, 4)` x0, y0, x1, y1 in pixels of the upright image,
                in place of the crop grid, each at least in part inside. They are encoded as the scorer's options
                say (of a scorer without regions as `SGI()` has it); the whole image is not added to them.
            batch_size, progress: as for `score`.
            on_error: `"raise"` stops at a picture that cannot be read; `"skip"` leaves it out and names it in
                a UserWarning; a function is called with each `ImageFailure` in place of the warning.
            ids: a name for each image; by default its path, or its row where it is no file.

        Returns:
            features whose `ids` tell which images are there.

        Raises:
            ImageError: a picture cannot be read, or none can.
            ValueError: no image, wrong number of ids or regions, an image without regions, a region without a pixel of
                its image, a batch size below 1, needs the encoder cannot meet.
        """
        check_batch_size("encode_images", batch_size)
        sources = as_list(images)
        names = names_of(sources, ids)
        check_regions("encode_images", regions, len(sources))
        if not callable(on_error):
            check_choice("encode_images", "on_error", on_error, ("raise", "skip"))
        needs = self._needs(scorer)
        parts: list[ImageFeatures] = []
        failures: list[ImageFailure] = []
        with one_thread_after_fork(), reporting(progress, "images") as report:
            for rows, part, failed in encoded_batches(
                self.encoder, sources, names, needs, boxes=regions, batch_size=batch_size, stop=on_error == "raise"
            ):
                failures += failed
                parts += [] if part is None else [part]
                if report is not None:
                    report(rows.stop, len(sources))
            if not parts:
                raise none_read(failures)
            report_failures(failures, on_error, len(sources))
            return ImageFeatures.cat(parts)

    def encode_texts(
        self,
        texts: str | Sequence[str],
        *,
        scorer: str | Scorer | Needs = "global",
        segments: Sequence[Sequence[str | Segment]] | None = None,
        batch_size: int = 64,
        progress: bool | Progress = False,
    ) -> TextFeatures:
        """Features of captions, with what a scorer needs; every distinct caption and segment is encoded once.

        Args:
            texts: one caption or many.
            scorer: whose needs are met; a `Needs` names them one by one.
            segments: for each caption its own segments, as words or `Segment` objects (which may be negated),
                in place of the segmenter's.
            batch_size, progress: as for `score`.

        Captions that are cut to the model's context are flagged in `truncated` and named in a UserWarning.

        Raises:
            ValueError: no text, too few segments or a batch size below 1.
            TypeError: what is no string.
        """
        check_batch_size("encode_texts", batch_size)
        captions = as_texts("encode_texts", texts)
        needs = self._needs(scorer)
        parts = None
        if segments is not None:
            parts = CaptionSegments.of(segments)
        elif needs.segments:
            parts = CaptionSegments.split(captions, self.segmenter)
        with one_thread_after_fork(), reporting(progress, "texts") as report:
            return encode_captions(
                self.encoder, captions, needs, segments=parts, batch_size=batch_size, progress=report
            )

    @one_thread_after_fork()
    def explain(self, image: Images, text: Texts, *, scorer: str | Scorer = "sgi") -> Explanation:
        """Which part of a caption found which part of an image, and the score that comes of it.

        `image` and `text` are one of each, as for `score` (also in a list of one); an explanation from features
        cannot be drawn. Raises what `score` raises, and ValueError for more than one image or text.
        """
        chosen = self.scorer(scorer)
        picture = None
        if isinstance(image, ImageFeatures):
            features = self._own(image)
        else:
            sources = as_list(image)
            if len(sources) != 1:
                raise ValueError(f"explain: wants one image and one text, got {len(sources)} images")
            picture = decode(sources[0])
            features = encode_pictures(self.encoder, [picture], names_of(sources), self._needs(chosen))
        texts = self._texts(text, chosen, 64)
        if len(features) != 1 or len(texts) != 1:
            raise ValueError(f"explain: wants one image and one text, got {len(features)} and {len(texts)}")
        chosen.check(features, texts, aligned_taps=aligned_taps(self.spec))
        total = chosen.pairs(features, texts)
        check_finite(chosen.name, total, texts, features.ids)
        words = texts.texts[0] if texts.texts else ""
        return Explanation(words, chosen.name, float(total[0]), tuple(chosen.matches(features, texts)), picture)

    def classify(
        self,
        images: Images,
        labels: Sequence[str],
        *,
        templates: Sequence[str] = TEMPLATES,
        output: Output = "probability",
        batch_size: int = 64,
        progress: bool | Progress = False,
    ) -> Tensor:
        """Zero-shot classification: scores of images against labels, `(n_images, n_labels)`.

        A label's embedding is the normalised mean of the embeddings of its sentences, one for each template, `{}`
        standing for the label (Radford et al. 2021, CLIP). Images and outputs as for `score`.

        Raises:
            ValueError: no label, the same label twice, or a template without `{}`.
        """
        check_batch_size("classify", batch_size)
        with one_thread_after_fork():
            prompts = label_prompts(self.encoder, labels, templates, batch_size=batch_size)
        return self.score(images, prompts, output=output, batch_size=batch_size, progress=progress)

    def scorer(self, scorer: str | Scorer) -> Scorer:
        """The scorer by name or as given, with an exported model's own head and the engine's backend where it has none.
        """
        chosen = get_scorer(scorer)
        if isinstance(chosen, HeadScorer) and chosen.head is None:
            own = self._own_head(chosen.name)
            chosen = chosen if own is None else replace(chosen, head=own)
        if self.backend is not None and getattr(chosen, "backend", self.backend) is None:
            chosen = replace(chosen, backend=self.backend)  # type: ignore[call-arg]
        return chosen

    def _own_head(self, name: str) -> Head | None:
        """The head of this kind that lies in the exported model's folder, read once; None where there is none."""
        if not isinstance(self.encoder, ExportedEncoder):
            return None
        with self._lock:
            if name not in self._heads:
                self._heads[name] = exported_head(self.encoder, name)
            return self._heads[name]

    def _needs(self, scorer: str | Scorer | Needs) -> Needs:
        """What a scorer needs. Raises ValueError for one whose trained part belongs to another encoder."""
        if isinstance(scorer, Needs):
            return scorer
        chosen = self.scorer(scorer)
        chosen.check_encoder(self.spec.fingerprint)
        return chosen.needs()

    def _texts(self, texts: Texts, scorer: Scorer, batch_size: int) -> TextFeatures:
        if isinstance(texts, TextFeatures):
            return self._own(texts)
        return self.encode_texts(texts, scorer=scorer, batch_size=batch_size)

    def _own(self, features: Features) -> Features:
        """The features on the encoder's device, refused when another encoder made them."""
        if features.fingerprint and features.fingerprint != self.spec.fingerprint:
            raise ValueError(
                f"{self.spec.name}: features must come from the encoder {self.spec.fingerprint}, got those "
                f"of {features.fingerprint}; encode them again"
            )
        return features.to(self.encoder.device)


def load(
    name: str = "scenes",
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    segmenter: str | Segmenter = "auto",
    backend: Backend | None = None,
) -> Engine:
    """An engine over a frozen encoder.

    Args:
        name: `"scenes"` (embedded), `"open_clip:<arch>/<tag or path>"`, … (see `peaksim models`), or a folder that
            `peaksim export` wrote.
        device: `"auto"` takes an accelerator where there is one.
        dtype: of the weights; `"auto"` is float32 on the CPU.
        segmenter, backend: as for `Engine`.

    Raises:
        ValueError: an unknown name or option.
        FileNotFoundError: weights that are not there.
    """
    _check_options(segmenter, backend)
    return Engine(load_encoder(name, device=device, dtype=dtype), segmenter=segmenter, backend=backend)


def _check_options(segmenter: str | Segmenter, backend: Backend | None) -> None:
    """Refuse unknown names before anything is loaded; whether the package is there shows when it is used."""
    if isinstance(segmenter, str) and not segmenter.startswith("spacy:"):
        check_choice("Engine", "segmenter", segmenter, ("auto", "spacy", "spacy:<package>", "rules"))
    if backend is not None:
        check_choice("Engine", "backend", backend, get_args(Backend))


def score(
    images: Images,
    texts: Texts,
    *,
    model: str = "scenes",
    scorer: str | Scorer = "global",
    pairs: bool = False,
    output: Output = "similarity",
    progress: bool | Progress = False,
) -> Tensor:
    """Scores of images against texts by the engine of that name, which stays loaded for the next call.

    Arguments and errors as for `load` and `Engine.score`; the two engines used last are kept.
    """
    return _loaded(model).score(images, texts, scorer=scorer, pairs=pairs, output=output, progress=progress)


_loading = OwnLock()


def _loaded(name: str) -> Engine:
    # One at a time: two threads that ask for the same model must not both load it.
    with _loading:
        return _load_once(name)


@lru_cache(maxsize=2)
def _load_once(name: str) -> Engine:
    return load(name)
