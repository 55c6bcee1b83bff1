"""The embedded `scenes` encoder: trained by this package on rendered scenes, shipped with it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.resources import as_file, files
from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from engine.atomic_files import write_text, written_whole
from engine.choices import CropMode, Fill
from engine.encoders.base import Encoder, EncoderSpec, Tokens, fingerprint
from engine.encoders.folders import made_folder
from engine.encoders.region_inputs import RegionInputs
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.encoders.text_rules import WORD_RULES
from engine.features import ClassPath, ImageFeatures, TextFeatures, TextReadout
from engine.images import normalise, resize

MEAN = (0.5, 0.5, 0.5)
STD = (0.25, 0.25, 0.25)
RESIZE: Literal["squash"] = "squash"
INTERPOLATION: Literal["bicubic"] = "bicubic"
SPECIAL = ("<pad>", "<start>", "<end>", "<unknown>")
FORMAT_VERSION = 1


class WordTokenizer:
    """Whole words to ids. Positions: start, words, end, padding to the context length."""

    def __init__(self, words: Sequence[str], context_length: int) -> None:
        self.words = tuple(words)
        self.context_length = context_length
        self._ids = {word: index for index, word in enumerate((*SPECIAL, *self.words))}
        if len(self._ids) != len(SPECIAL) + len(self.words):
            raise ValueError("WordTokenizer: words must be distinct and none of the special tokens")

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self._ids)

    def split(self, text: str) -> list[str]:
        """The words of a text in lower case."""
        return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())

    def unknown(self, text: str) -> list[str]:
        """The words of a text that the vocabulary lacks."""
        return [word for word in self.split(text) if word not in self._ids]

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokens of shape `(B, context_length)`."""
        shape = (len(texts), self.context_length)
        ids = torch.zeros(shape, dtype=torch.int64)
        attention, words = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        end, truncated = torch.zeros(len(texts), dtype=torch.int64), torch.zeros(len(texts), dtype=torch.bool)
        shown = []
        room = self.context_length - 2
        for row, text in enumerate(texts):
            pieces = self.split(text)
            truncated[row] = len(pieces) > room
            pieces = ["<start>", *pieces[:room], "<end>"]
            length = len(pieces)
            ids[row, :length] = torch.tensor([self._ids.get(piece, self._ids["<unknown>"]) for piece in pieces])
            attention[row, :length] = True
            words[row, 1 : length - 1] = True
            end[row] = length - 1
            shown.append((*pieces, *["<pad>"] * (self.context_length - length)))
        return Tokens(ids, attention, words, end, truncated, tuple(texts), tuple(shown))


def warn_of_unknown_words(who: str, tokenizer: WordTokenizer, texts: Sequence[str]) -> None:
    """Name the words that the vocabulary lacks in a UserWarning, in the name of whoever called the caller."""
    unknown = sorted({word for text in texts for word in tokenizer.unknown(text)})
    if unknown:
        warnings.warn(
            f"{who}: the embedded model knows {len(tokenizer.words)} words and not {', '.join(unknown)}; "
            "they count as one unknown word",
            UserWarning,
            stacklevel=3,
        )


class ScenesEncoder(Encoder):
    """`ScenesModel` with its words and pixel rules."""

    def __init__(self, model: ScenesModel, words: Sequence[str], *, name: str, device: torch.device) -> None:
        config = model.config
        self.device = device
        self.tokenizer = WordTokenizer(words, config.context_length)
        self._model = model.float().eval().requires_grad_(False).to(device)
        rules = {"words": self.tokenizer.words, "mean": MEAN, "std": STD, "config": asdict(config), "rules": WORD_RULES}
        self.spec = EncoderSpec(
            name=name,
            family="scenes",
            embed_dim=config.embed_dim,
            image_size=config.image_size,
            grid=(config.side, config.side),
            image_layers=config.image_layers,
            text_layers=config.text_layers,
            image_width=config.width,
            text_width=config.width,
            context_length=config.context_length,
            mean=MEAN,
            std=STD,
            resize=RESIZE,
            interpolation=INTERPOLATION,
            logit_scale=float(model.log_scale.exp()),
            logit_bias=0.0,
            probability="softmax",
            activation="hard_swish",
            taps={"projected": True, "value": True},
            text_rules=WORD_RULES,
            fingerprint=fingerprint(rules, model.state_dict()),
        )

    @property
    def model_config(self) -> ScenesModelConfig:
        """Sizes of both towers."""
        return self._model.config

    def state_dict(self) -> dict[str, Tensor]:
        """Every weight by name, the encoder's own memory: copy before changing any."""
        return self._model.state_dict()

    def preprocess(self, image: Image.Image) -> Tensor:
        size = self.spec.image_size
        return normalise(resize(image, size, RESIZE, interpolation=INTERPOLATION), MEAN, STD)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write weights, sizes and words as one folder; `scenes:<folder>` loads it back with the same fingerprint.

        Raises:
            OSError: the folder is a file or cannot be made.
            ValueError: no name.
        """
        target = made_folder(self.spec.name, folder)
        save_scenes(target, self._model, self.tokenizer.words, exact=True)

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor, *, tap: str | None = None, layers: Sequence[int] = ()) -> ImageFeatures:
        self._check_tap(tap)
        self._check_layers("image", layers, self.spec.image_layers)
        tower = self._model.image
        if tap is None and not layers:
            # Most crops end here: nothing but the class token is wanted of them.
            state = tower.class_state(pixels)
            return ImageFeatures(
                embedding=functional.normalize(tower.projection(tower.norm(state)), dim=-1),
                fingerprint=self.spec.fingerprint,
            )
        states, hidden, before_last = tower(pixels, layers)
        patches = None
        if tap == "projected":
            patches = states[:, 1:]
        elif tap == "value":
            patches = tower.last_value_path(before_last)[:, 1:]
        if patches is not None:
            patches = functional.normalize(tower.projection(tower.norm(patches)), dim=-1)
        return ImageFeatures(
            embedding=functional.normalize(tower.projection(tower.norm(states[:, 0])), dim=-1),
            patches=patches,
            grid=self.spec.grid if patches is not None else None,
            aligned=patches is not None,
            tap=tap or "",
            hidden=hidden,
            fingerprint=self.spec.fingerprint,
        )

    def _encode_regions(
        self, images: Sequence[Image.Image], boxes: Sequence[np.ndarray], mode: CropMode, fill: Fill, batch_size: int
    ) -> Tensor:
        # One way for every installation, so that scores do not depend on it: crop_batch gives the bytes of
        # Pillow 13 and raises, saying how to get them, where the kernels are missing.
        inputs = RegionInputs.of(images, boxes, mode=mode, fill=fill)
        done = [self.encode_pixels(x.to(self.device)).embedding for x in inputs.batches(self.spec, batch_size)]
        return torch.cat(done)[torch.tensor(inputs.rows, device=self.device)]

    @torch.no_grad()
    def encode_windows(self, pixels: Tensor, windows: Tensor) -> Tensor:
        tower = self._model.image
        states = tower.window_states(pixels, windows.to(pixels.device))
        return functional.normalize(tower.projection(tower.norm(states)), dim=-1)

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        warn_of_unknown_words(self.spec.name, self.tokenizer, texts)
        return self.tokenizer(texts)

    @torch.no_grad()
    def encode_tokens(self, tokens: Tokens, *, token_vectors: bool = False, layers: Sequence[int] = ()) -> TextFeatures:
        self._check_layers("text", layers, self.spec.text_layers)
        tower = self._model.text
        ids, end = tokens.ids.to(self.device), tokens.end.to(self.device)
        states, hidden = tower(ids, layers)
        last = tower.norm(states[torch.arange(len(ids), device=self.device), end])
        vectors = functional.normalize(tower.projection(tower.norm(states)), dim=-1) if token_vectors else None
        return TextFeatures(
            embedding=functional.normalize(tower.projection(last), dim=-1),
            tokens=vectors,
            token_mask=tokens.word_mask.to(self.device),
            attention_mask=tokens.attention_mask.to(self.device),
            end=end,
            hidden=hidden,
            truncated=tokens.truncated,
            token_texts=tokens.token_texts,
            texts=tokens.texts,
            fingerprint=self.spec.fingerprint,
        )

    def text_readout(self) -> TextReadout:
        tower = self._model.text
        return TextReadout(tower.norm.weight, tower.norm.bias, tower.projection.weight, norm_eps=tower.norm.eps)

    def class_path(self, layers: Sequence[int]) -> ClassPath | None:
        tower = self._model.image
        if not layers or not all(1 <= layer < len(tower.blocks) for layer in layers):
            return None
        return ClassPath(
            heads=self.model_config.heads,
            activation=self.spec.activation,
            blocks=tuple(tower.blocks[layer].state_dict() for layer in layers),
            norm_weight=tower.norm.weight,
            norm_bias=tower.norm.bias,
            projection=tower.projection.weight,
        )


def pixels_from_uint8(images: Tensor) -> Tensor:
    """`(B, H, W, 3)` uint8 to the model's normalised input `(B, 3, H, W)`, float32."""
    scaled = images.permute(0, 3, 1, 2).float() / 255
    return ((scaled - MEAN[0]) / STD[0]).contiguous()


def save_scenes(folder: str | PathLike[str], model: ScenesModel, words: Sequence[str], *, exact: bool = False) -> None:
    """Write `model.safetensors` (float16) and `model.json`, which `load_scenes` reads.

    With `exact`, tensors that float16 does not hold exactly are written as float32.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    state = {name: _stored(tensor.detach(), exact).contiguous() for name, tensor in model.state_dict().items()}
    facts = {"format_version": FORMAT_VERSION, "config": asdict(model.config), "words": list(words)}
    with written_whole(target / "model.safetensors") as path:
        save_file(state, path)
    write_text(target / "model.json", json.dumps(facts, indent=1))


def _stored(weights: Tensor, exact: bool) -> Tensor:
    """The weights as float16, or as they are where that would change them and they must not."""
    half = weights.half()
    return weights if exact and not torch.equal(half.float(), weights) else half


def load_scenes(folder: str | PathLike[str] | None = None, *, device: torch.device | str = "cpu") -> ScenesEncoder:
    """The embedded encoder, or one that `peaksim train scenes` wrote into `folder`.

    Raises:
        FileNotFoundError: naming the missing file.
        ValueError: naming a file that is damaged or of another format.
    """
    if folder is not None:
        return _load_folder(Path(folder), f"scenes:{folder}", torch.device(device))
    with as_file(files("engine") / "assets" / "scenes") as shipped:
        return _load_folder(shipped, "scenes", torch.device(device))


def _load_folder(folder: Path, name: str, device: torch.device) -> ScenesEncoder:
    for file in ("model.json", "model.safetensors"):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{name}: {folder / file} is missing; it is written by `peaksim train scenes`")
    config, words = _read_facts(name, folder / "model.json")
    # Without numbers of its own: to draw first ones that the file replaces would move torch's generator.
    with torch.device("meta"):
        model = ScenesModel(config)
    try:
        state = load_file(folder / "model.safetensors")
        model.load_state_dict({key: tensor.float() for key, tensor in state.items()}, assign=True)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{name}: {folder / 'model.safetensors'} must hold the weights that model.json describes, got {error}"
        ) from error
    return ScenesEncoder(model, words, name=name, device=device)


def _read_facts(name: str, path: Path) -> tuple[ScenesModelConfig, list[str]]:
    """Sizes and words of `model.json`. Raises ValueError, naming the file, for anything but a whole one."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {path} is damaged: it is no JSON ({error})") from error
    version = facts.get("format_version") if isinstance(facts, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{name}: {path} has format {version}, wanted {FORMAT_VERSION}")
    sizes, words = facts.get("config"), facts.get("words")
    known = {item.name for item in fields(ScenesModelConfig)}
    if not isinstance(sizes, dict) or set(sizes) != known:
        got = sorted(sizes) if isinstance(sizes, dict) else sizes
        raise ValueError(f"{name}: {path} must state as config {sorted(known)}, got {got!r}")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{name}: {path} must state its words as a list of strings, got {words!r:.80}")
    try:
        config = ScenesModelConfig(**sizes)
        ids = WordTokenizer(words, config.context_length).size
    except ValueError as error:
        raise ValueError(f"{name}: {path} is damaged ({error})") from error
    if ids > config.vocabulary:
        raise ValueError(
            f"{name}: {path} must have a vocabulary of at least {ids}, one for each of its {len(words)} words and "
            f"{len(SPECIAL)} special ones, got {config.vocabulary}"
        )
    return config, words
