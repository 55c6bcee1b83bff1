"""Frozen encoders from open_clip: CLIP (GELU and QuickGELU), SigLIP, SigLIP 2, PE-Core; others global only.

Patch taps are those of `engine.encoders.towers.TAPS`. A CLIP ViT projects a patch as it projects its class
token; SigLIP and PE pool by attention, and a patch vector is the pool's output when that patch is all it
sees.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.atomic_files import write_text, written_whole
from engine.encoders.base import EncoderSpec, Tokens, fingerprint
from engine.encoders.folders import made_folder
from engine.encoders.hub_tokenizer import HubTokenizer
from engine.encoders.open_clip_checkpoints import load_weights
from engine.encoders.open_clip_sources import CONFIG_FILE, WEIGHT_FILES, Source, buildable, find_source
from engine.encoders.open_clip_text import build_tokenizer
from engine.encoders.open_clip_towers import image_tower, text_tower
from engine.encoders.pixels import PixelRules
from engine.encoders.placement import place
from engine.encoders.settings import built_from
from engine.encoders.text_rules import probe
from engine.encoders.towers import DualEncoder, freeze, refuse_changed_files
from engine.images import ResizePolicy

_POLICIES: dict[str, ResizePolicy] = {"shortest": "crop", "squash": "squash", "longest": "pad"}


class OpenClipEncoder(DualEncoder):
    """A model of open_clip with its pixel and text rules; made by `load_open_clip`."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        source: Source,
        *,
        resize: str,
        tokenizer: Path | None,
        placement: tuple[torch.device, torch.dtype],
    ) -> None:
        self._config, self._preprocess = source.config, source.preprocess
        self.device, self._dtype = placement
        text_cfg = source.config["text_cfg"]
        self._tokenizer, rules = build_tokenizer(name, model, text_cfg, folder=source.folder, chosen=tokenizer)
        self._pixels = _pixel_rules(name, model, source.preprocess, resize)
        family = _family(source.config)
        facts = {
            "family": family,
            "model": json.dumps(source.config, sort_keys=True, default=str),
            "pixels": self._pixels.facts(),
            "text": (rules, self._tokenizer.digest(), probe(self._tokenizer)),
        }
        # Taken in the checkpoint's own numbers: half precision on a GPU reads the same weights.
        mark = fingerprint(facts, model.state_dict())
        self._image, self._text = image_tower(model), text_tower(model)
        self._model: Any = freeze(model, self.device, self._dtype)
        self.spec = self._describe(name, family, rules, mark)

    def preprocess(self, image: Image.Image) -> Tensor:
        return self._pixels(image)

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        return self._tokenizer(texts)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write weights, configuration and tokenizer as one folder; `open_clip:<folder>` loads it back.

        The folder states the fingerprint, and loading refuses files that were changed.

        Raises:
            ValueError: an encoder of half precision, which no longer has the exact weights; no name.
            OSError: the folder is a file or cannot be made.
        """
        self._check_savable()
        target = made_folder(self.spec.name, folder)
        state = {name: tensor.cpu().contiguous() for name, tensor in self._model.state_dict().items()}
        with written_whole(target / WEIGHT_FILES[0]) as path:
            save_file(state, path)
        content = {
            "model_cfg": self._config,
            "preprocess_cfg": self._preprocess,
            "peaksim": self._stated(),
        }
        write_text(target / CONFIG_FILE, json.dumps(content, indent=1))
        if isinstance(self._tokenizer, HubTokenizer):
            self._tokenizer.source.save_pretrained(target)

    def _embed_pixels(self, pixels: Tensor) -> Tensor:
        features = self._model.encode_image(pixels.to(self._dtype))
        return features[0] if isinstance(features, tuple) else features

    def _embed_ids(self, ids: Tensor) -> Tensor:
        length = self._config["text_cfg"].get("context_length", 77)
        features = self._model.encode_text(ids[:, :length])
        return features[0] if isinstance(features, tuple) else features

    def _describe(self, name: str, family: str, rules: str, mark: str) -> EncoderSpec:
        model, text_cfg = self._model, self._config["text_cfg"]
        bias = getattr(model, "logit_bias", None)
        return EncoderSpec(
            name=name,
            family=family,
            embed_dim=int(self._config["embed_dim"]),
            image_size=self._pixels.size,
            grid=self._image.grid,
            image_layers=len(self._image.blocks),
            text_layers=len(self._text.blocks),
            image_width=self._image.width,
            text_width=self._text.width,
            context_length=int(text_cfg.get("context_length", 77)),
            mean=self._pixels.mean,
            std=self._pixels.std,
            resize=self._pixels.geometry,
            interpolation=self._pixels.interpolation,
            logit_scale=float(model.logit_scale.detach().float().exp()),
            logit_bias=0.0 if bias is None else float(bias.detach().float()),
            probability="softmax" if bias is None else "sigmoid",
            activation="quick_gelu" if self._config.get("quick_gelu") else "gelu",
            taps=self._image.taps,
            text_rules=rules,
            fingerprint=mark,
        )


def load_open_clip(
    reference: str,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    resize: str | None = None,
    activation: str | None = None,
    preprocess: str | None = None,
    tokenizer: str | PathLike[str] | None = None,
) -> OpenClipEncoder:
    """Load a frozen encoder of open_clip.

    Args:
        reference: `<arch>/<tag>`, `<arch>/<checkpoint path>`, `hf-hub:<owner>/<name>` or a folder with
            `open_clip_config.json`. A local path never touches the network.
        device, dtype: see `engine.encoders.placement.place`.
        resize: `"model"` (the checkpoint's policy), `"source"` (open_clip's own transform), `"crop"`,
            `"squash"` or `"pad"`; None is `"model"`, or what a folder was saved with.
        activation: `"gelu"` or `"quick_gelu"` of a checkpoint whose architecture has both.
        preprocess: a tag whose preprocessing a bare checkpoint shares, or `"clip"`, `"siglip"`, `"pe"`.
        tokenizer: folder of the tokenizer, for models whose tokenizer lies on the hub.

    Raises:
        ValueError: an unknown architecture or tag, an activation or preprocessing that is left open or contradictory,
            weights that do not fit or were changed since they were saved.
        FileNotFoundError: naming what is missing.
        OSError: the network is needed and cannot be reached.
    """
    placement = place(device, dtype)
    source = find_source(reference, activation=activation, preprocess=preprocess)
    with built_from(f"open_clip:{reference}: {CONFIG_FILE}", "open_clip"):
        model = build_model(buildable(f"open_clip:{reference}", source))
    load_weights(model, source.checkpoint, source.architecture)
    facts = source.checkpoint.facts if source.architecture == str(source.folder) else {}
    encoder = OpenClipEncoder(
        f"open_clip:{reference}",
        model,
        source,
        resize=resize or facts.get("resize", "model"),
        tokenizer=None if tokenizer is None else Path(tokenizer).expanduser(),
        placement=placement,
    )
    refuse_changed_files(encoder.spec, CONFIG_FILE, facts, resize)
    return encoder


def build_model(config: dict[str, Any]) -> nn.Module:
    """An open_clip model of random weights; nothing is fetched, no global random state moves."""
    import open_clip

    config = deepcopy(config)
    custom = bool(config.pop("custom_text", False)) or "hf_model_name" in config["text_cfg"]
    if "timm_model_name" in config["vision_cfg"]:
        config["vision_cfg"]["timm_model_pretrained"] = False
    if "hf_model_name" in config["text_cfg"]:
        config["text_cfg"]["hf_model_pretrained"] = False
    if custom and "multimodal_cfg" in config:
        kind = open_clip.CoCa
    else:
        kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    with torch.random.fork_rng(devices=[]):
        return kind(**config)


def _family(config: dict[str, Any]) -> str:
    vision = str(config["vision_cfg"].get("timm_model_name", "")).lower()
    if "siglip" in vision:
        text = config["text_cfg"]
        second = "siglip2" in str(text.get("hf_tokenizer_name", "")).lower() or text.get("vocab_size") == 256000
        return "siglip2" if second else "siglip"
    return "pe" if "pe_core" in vision else "clip"


def _pixel_rules(name: str, model: Any, preprocess: dict[str, Any], resize: str) -> PixelRules:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    sizes = model.visual.image_size
    height, width = sizes if isinstance(sizes, tuple | list) else (sizes, sizes)
    if height != width:
        raise ValueError(f"{name}: the input must be square, got {height} x {width}")
    if preprocess["resize_mode"] not in _POLICIES:
        raise ValueError(
            f"{name}: resize_mode must be one of {', '.join(_POLICIES)}, got {preprocess['resize_mode']!r}"
        )
    return PixelRules(
        size=int(height),
        mean=preprocess["mean"],
        std=preprocess["std"],
        policy=_POLICIES[preprocess["resize_mode"]],
        interpolation=preprocess["interpolation"],
        source=image_transform_v2(PreprocessCfg(size=int(height), **preprocess), is_train=False),
        fill=preprocess["fill_color"],
        mode=resize,
    )
