"""Frozen encoders from transformers: CLIP, SigLIP, SigLIP 2 (of fixed resolution and native aspect ratio).

Patch taps are those of `engine.encoders.towers.TAPS`. SigLIP and SigLIP 2 pool by attention: a patch
vector is the pool's output when that patch is all it sees.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from engine.atomic_files import write_text
from engine.encoders.base import EncoderSpec, Tokens, fingerprint
from engine.encoders.folders import made_folder
from engine.encoders.hub_tokenizer import HubTokenizer
from engine.encoders.pixels import PixelRules
from engine.encoders.placement import place
from engine.encoders.settings import three_numbers
from engine.encoders.text_rules import HF_CLIP_RULES, SIGLIP2_RULES, SIGLIP_RULES, Cleaning, EndRule, probe
from engine.encoders.towers import DualEncoder, freeze, refuse_changed_files
from engine.encoders.transformers_files import PROCESSOR_FILE, STATED_FILE, Files, read_files
from engine.encoders.transformers_towers import image_tower, text_tower
from engine.images import Interpolation, ResizePolicy

_TEXT_RULES = {"clip": HF_CLIP_RULES, "siglip": SIGLIP_RULES, "siglip2": SIGLIP2_RULES}
_FILTERS: dict[int, Interpolation] = {2: "bilinear", 3: "bicubic"}


class TransformersEncoder(DualEncoder):
    """A CLIP-like model of transformers with its pixel and text rules; made by `load_transformers`."""

    def __init__(self, name: str, files: Files, *, resize: str, placement: tuple[torch.device, torch.dtype]) -> None:
        self.device, self._dtype = placement
        self._files = files
        model = files.model
        self._kind: str = model.config.model_type
        self._family = _family(self._kind, files.tokenizer)
        self._tokenizer = _tokenizer(model, files.tokenizer, self._family)
        vision = model.config.vision_config
        patch = int(vision.patch_size)
        side = int(vision.num_patches**0.5) if self._native else int(vision.image_size) // patch
        self._pixels = _pixel_rules(name, files.processor, side * patch, resize, native=self._native)
        grid = None if self._native else (side, side)
        facts = {
            "family": self._family,
            "model": _settings(model.config),
            "pixels": self._pixels.facts(),
            "text": (_TEXT_RULES[self._family], self._tokenizer.digest(), probe(self._tokenizer)),
        }
        # Taken in the checkpoint's own numbers: half precision on a GPU reads the same weights.
        mark = fingerprint(facts, model.state_dict())
        self._image, self._text = image_tower(model, grid), text_tower(model)
        self._model: Any = freeze(model, self.device, self._dtype)
        self.spec = self._describe(name, mark)

    @property
    def _native(self) -> bool:
        """Images keep their aspect ratio and become sequences of patches of their own grid."""
        return self._kind == "siglip2"

    def preprocess(self, image: Image.Image) -> Tensor:
        """Normalised input `(3, image_size, image_size)`; at native aspect `(1 + P, 3 * patch * patch)`.

        The latter are the patches of one image, padded to the model's number, after a first row that starts
        with the rows and columns of the image's grid.
        """
        if not self._native:
            return self._pixels(image)
        inputs = self._files.processor(images=image, return_tensors="pt")
        patches = inputs["pixel_values"][0].float()
        head = patches.new_zeros(1, patches.shape[1])
        head[0, :2] = inputs["spatial_shapes"][0]
        return torch.cat([head, patches])

    def preprocess_region(self, image: Image.Image) -> Tensor:
        # At native aspect a region is seen whole without being squashed.
        return self.preprocess(image) if self._native else super().preprocess_region(image)

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        return self._tokenizer(texts)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write model, tokenizer and image processor as one folder; `hf:<folder>` loads it back.

        The folder states the fingerprint, and loading refuses files that were changed.

        Raises:
            ValueError: an encoder of half precision, which no longer has the exact weights; no name.
            OSError: the folder is a file or cannot be made.
        """
        self._check_savable()
        target = made_folder(self.spec.name, folder)
        for part in (self._model, self._files.tokenizer, self._files.processor):
            part.save_pretrained(target)
        usual = stat.S_IMODE((target / "config.json").stat().st_mode)
        for weights in target.glob("*.safetensors"):
            # Written by way of a temporary file that only its owner may read.
            weights.chmod(usual)
        write_text(target / STATED_FILE, json.dumps(self._stated(), indent=1))

    def _embed_pixels(self, pixels: Tensor) -> Tensor:
        if not self._native:
            return _pooled(self._model.get_image_features(pixel_values=pixels.to(self._dtype)))
        shapes = pixels[:, 0, :2].round().long()
        mask = self._patch_mask(pixels)
        assert mask is not None
        features = self._model.get_image_features(
            pixel_values=pixels[:, 1:].to(self._dtype), pixel_attention_mask=mask.int(), spatial_shapes=shapes
        )
        return _pooled(features)

    def _patch_mask(self, pixels: Tensor) -> Tensor | None:
        if not self._native:
            return None
        counts = pixels[:, 0, :2].round().long().prod(dim=1, keepdim=True)
        return torch.arange(pixels.shape[1] - 1, device=pixels.device)[None] < counts

    def _embed_ids(self, ids: Tensor) -> Tensor:
        # No attention mask: CLIP's tower is causal, and SigLIP was trained with its padding in view.
        return _pooled(self._model.get_text_features(input_ids=ids))

    def _describe(self, name: str, mark: str) -> EncoderSpec:
        model = self._model
        bias = getattr(model, "logit_bias", None)
        return EncoderSpec(
            name=name,
            family=self._family,
            embed_dim=_embed_dim(model.config),
            image_size=self._pixels.size,
            grid=self._image.grid,
            image_layers=len(self._image.blocks),
            text_layers=len(self._text.blocks),
            image_width=self._image.width,
            text_width=self._text.width,
            context_length=self._tokenizer.context_length,
            mean=self._pixels.mean,
            std=self._pixels.std,
            resize=self._pixels.geometry,
            interpolation=self._pixels.interpolation,
            logit_scale=float(model.logit_scale.detach().float().exp()),
            logit_bias=0.0 if bias is None else float(bias.detach().float()),
            probability="softmax" if bias is None else "sigmoid",
            activation=str(model.config.vision_config.hidden_act),
            taps=self._image.taps,
            text_rules=_TEXT_RULES[self._family],
            fingerprint=mark,
        )


def load_transformers(
    reference: str,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    resize: str | None = None,
    tokenizer: str | PathLike[str] | None = None,
) -> TransformersEncoder:
    """Load a frozen CLIP, SigLIP or SigLIP 2 of transformers.

    Args:
        reference: hub name (`openai/clip-vit-base-patch32`) or local folder, which never touches the network.
        device, dtype: see `engine.encoders.placement.place`.
        resize: `"model"` (the processor's policy through `engine.images`: Pillow's pixels, and torchvision's
            rounding of a crop's offset, where transformers may cut one pixel further left and up), `"source"`
            (the image processor's own code), `"crop"`, `"squash"` or `"pad"`; None is `"model"`, or what
            a folder was saved with.
        tokenizer: folder of the tokenizer, where the model's folder has none.

    Raises:
        FileNotFoundError: naming the missing file.
        ValueError: another kind of model, for weights that do not fit or were changed since they were saved, for
            preprocessing that is no named policy.
        OSError: the network is needed and cannot be reached.
    """
    name = f"hf:{reference}"
    placement = place(device, dtype)
    files = read_files(name, reference, tokenizer=None if tokenizer is None else Path(tokenizer).expanduser())
    encoder = TransformersEncoder(
        name, files, resize=resize or files.stated.get("resize", "model"), placement=placement
    )
    refuse_changed_files(encoder.spec, STATED_FILE, files.stated, resize)
    return encoder


def _pooled(features: Any) -> Tensor:
    """The global features, which newer versions return inside an output object."""
    return features if isinstance(features, Tensor) else features.pooler_output


def _family(kind: str, tokenizer: Any) -> str:
    """SigLIP 2 of fixed resolution has SigLIP's architecture; its Gemma vocabulary tells it apart."""
    words = type(tokenizer).__name__
    return "siglip2" if kind == "siglip" and ("Gemma" in words or "Siglip2" in words) else kind


def _tokenizer(model: Any, source: Any, family: str) -> HubTokenizer:
    text = model.config.text_config
    # Old CLIP configurations state 2, which is no end token; the model then pools the highest id.
    pool = "last" if family != "clip" else "argmax" if text.eos_token_id == 2 else "eos"
    cleanings = {"clip": "none", "siglip": "siglip", "siglip2": "lower"}
    return HubTokenizer(
        source,
        int(text.max_position_embeddings),
        clean=Cleaning(cleanings[family]),
        end=EndRule(pool, int(text.eos_token_id)),
    )


def _embed_dim(config: Any) -> int:
    if config.model_type == "clip":
        return int(config.projection_dim)
    return int(config.vision_config.hidden_size)


def _settings(config: Any) -> tuple[object, ...]:
    """What decides the numbers beside the weights."""
    names = ("hidden_act", "layer_norm_eps", "num_attention_heads", "patch_size", "eos_token_id")
    parts = (config.text_config, config.vision_config)
    return (config.model_type, *(getattr(part, name, None) for part in parts for name in names))


def _pixel_rules(name: str, processor: Any, size: int, resize: str, *, native: bool) -> PixelRules:
    facts = processor.to_dict()
    where = f"{name}: {PROCESSOR_FILE}"
    sides, cut = (_sides(where, key, facts.get(key)) for key in ("size", "crop_size"))
    resample = facts.get("resample")
    if not isinstance(resample, int):
        raise ValueError(f"{where}: resample must be the number of a filter of Pillow, got {resample!r}")
    policy: ResizePolicy | None = None
    if native or (sides == {"height": size, "width": size} and not facts.get("do_center_crop")):
        policy = "squash"
    elif sides.get("shortest_edge") == size and facts.get("do_center_crop") and set(cut.values()) == {size}:
        policy = "crop"
    plain = facts.get("do_resize", True) and facts.get("do_rescale", True) and int(resample) in _FILTERS
    if native and resize not in ("model", "source"):
        raise ValueError(f"{name}: a model of native aspect ratio has its own resizing, got resize={resize!r}")
    if not native and resize == "model" and not (policy and plain):
        raise ValueError(
            f"{name}: the image processor's steps (size {sides}, crop {cut or None}) are no named policy for "
            f"a {size} x {size} input; use resize='source' to run them as they are, or name a policy"
        )
    normalised = facts.get("do_normalize", True)
    return PixelRules(
        size=size,
        mean=three_numbers(where, "image_mean", facts.get("image_mean")) if normalised else (0.0, 0.0, 0.0),
        std=three_numbers(where, "image_std", facts.get("image_std"), positive=True) if normalised else (1.0, 1.0, 1.0),
        policy=policy or "crop",
        interpolation=_FILTERS.get(int(resample), "bicubic"),
        source=lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0],
        mode=resize,
    )


def _sides(where: str, key: str, value: Any) -> dict[str, Any]:
    """The sides that an image processor states under a key, those it leaves open left out."""
    try:
        stated = dict(value or {})
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {key} must state sides by name, got {value!r:.60}") from None
    return {name: side for name, side in stated.items() if side is not None}
