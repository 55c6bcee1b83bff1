"""What every head is: a small module on frozen features that scores images against texts, and how it is stored.

A head reads features and nothing else: it never sees pixels or an encoder, so gradients stop at it. Its file holds the
weights, its configuration, and the fingerprint of the encoder whose features it was trained on.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.atomic_files import written_whole
from engine.features import ImageFeatures, Needs, TextFeatures, missing

FORMAT_VERSION = 1
HeadType = TypeVar("HeadType", bound="StoredHead")
ConfigType = TypeVar("ConfigType", bound="HeadConfig")


class EncoderFacts(Protocol):
    """What a head must know of an encoder; `EncoderSpec` has it all."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int] | None: ...
    @property
    def image_layers(self) -> int: ...
    @property
    def text_layers(self) -> int: ...
    @property
    def image_width(self) -> int: ...
    @property
    def text_width(self) -> int: ...


@dataclass(frozen=True)
class HeadConfig(ABC):
    """Sizes and options of a head: with its weights all that is needed to build it again.

    What depends on the encoder has the default 0 or `()` and is filled in by `fitted`. Fields are plain values
    or tuples of them, so that they can be stored as JSON.
    """

    @abstractmethod
    def fitted(self: ConfigType, encoder: EncoderFacts) -> ConfigType:
        """The same with the encoder's sizes where none were given. Raises ValueError where they cannot be met."""


class Trainable(nn.Module, ABC):
    """What the training loop trains: a head, or a whole encoder.

    Attributes:
        name: of its kind.
        config: a frozen dataclass of plain values.
        fingerprint: of the encoder it belongs to, or began as.
    """

    name: ClassVar[str]
    config: Any
    fingerprint: str

    def scale(self) -> Tensor | float:
        """What scores are multiplied by to be the logits of a contrastive loss."""
        return 1.0

    def anneal(self, share: float) -> None:
        """Told by the training before each step what share of it is done, 0..1; most kinds do not care."""

    @abstractmethod
    def save(self, path: str | PathLike[str], *, facts: Mapping[str, object] | None = None) -> Path:
        """Write what was trained, with plain values on how; the path that is given to whoever uses it."""

    @property
    def parameter_count(self) -> int:
        """Trainable numbers."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)


class StoredHead(Trainable):
    """A small trainable module on frozen features, built for an encoder and kept in a file of its own.

    Args:
        config: fitted to an encoder, see `HeadConfig`.
        encoder, fingerprint: name and fingerprint of the encoder the head belongs to; empty for features of any.
    """

    config_type: ClassVar[type[HeadConfig]]

    def __init__(self, config: HeadConfig, *, encoder: str = "", fingerprint: str = "") -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.fingerprint = fingerprint

    @classmethod
    def build(
        cls: type[HeadType], encoder: EncoderFacts, config: HeadConfig | None = None, *, seed: int = 0
    ) -> HeadType:
        """A new head for the features of this encoder, its weights drawn from `seed` alone."""
        fitted = (config or cls.config_type()).fitted(encoder)
        # The caller's random numbers go on as if nothing had happened.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(fitted, encoder=encoder.name, fingerprint=encoder.fingerprint)

    def save(
        self, path: str | PathLike[str], *, facts: Mapping[str, object] | None = None, half: bool = False
    ) -> Path:
        """Write one safetensors file, which `engine.heads.registry.load_head` reads.

        `facts` are plain values kept beside the configuration, such as how the head was trained. `half` stores the
        weights as float16, which is enough to serve them; they are read as float32.
        """
        plain = {
            "kind": "head",
            "format_version": FORMAT_VERSION,
            "head": self.name,
            "config": asdict(self.config),
            "encoder": self.encoder,
            "fingerprint": self.fingerprint,
            "facts": dict(facts or {}),
        }
        state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.state_dict().items()}
        if half:
            state = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as unfinished:
            save_file(state, unfinished, metadata={"peaksim": json.dumps(plain)})
        return target


class Head(StoredHead):
    """A trainable scorer of frozen features; arguments as of `StoredHead`."""

    @abstractmethod
    def needs(self) -> Needs:
        """What the features must hold."""

    @abstractmethod
    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n_images, n_texts)`, float32; differentiable with respect to the head."""

    @abstractmethod
    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n,)` of image i with text i, float32; differentiable with respect to the head."""

    def chosen(self, images: ImageFeatures, texts: TextFeatures, image_rows: Tensor, text_rows: Tensor) -> Tensor:
        """Scores `(n,)` of image `image_rows[k]` with text `text_rows[k]`; rows may come more than once."""
        return self.pairs(images[image_rows], texts[text_rows])

    def check(self, images: ImageFeatures, texts: TextFeatures) -> None:
        """Raise ValueError for features of another encoder, or without what this head needs."""
        for what, features in (("images", images), ("texts", texts)):
            check_belongs(f"{self.name}: the {what}", self, features.fingerprint)
        absent = missing(self.needs(), images, texts)
        if absent:
            raise ValueError(
                f"{self.name}: needs {', '.join(absent)}, which the features do not hold; encode them with "
                "encode_images/encode_texts(..., scorer=head.needs())"
            )

    def check_pairs(self, images: ImageFeatures, texts: TextFeatures) -> None:
        """`check`, and as many images as texts."""
        self.check(images, texts)
        if len(images) != len(texts):
            raise ValueError(
                f"{self.name}: pairs need as many images as texts, got {len(images)} images and {len(texts)} texts"
            )


@dataclass(frozen=True)
class HeadFile:
    """What a head's file says of it, and its weights.

    Attributes:
        head: name of its kind.
        config: fields of its configuration.
        encoder, fingerprint: the encoder it belongs to.
        facts: what was stored beside them.
    """

    head: str
    config: Mapping[str, Any]
    encoder: str
    fingerprint: str
    facts: Mapping[str, Any]
    state: Mapping[str, Tensor]

    def make(self, kind: type[HeadType], path: str | PathLike[str]) -> HeadType:
        """The head on the CPU, in evaluation mode. Raises ValueError for a file that does not fit its kind."""
        known = {item.name for item in fields(kind.config_type)}
        if set(self.config) - known:
            strange = ", ".join(sorted(set(self.config) - known))
            raise ValueError(f"load_head: {path} holds options that {kind.name} has no place for: {strange}")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in self.config.items()}
        try:
            # Drawing first weights would move the caller's random numbers, for weights that the file replaces.
            with torch.random.fork_rng(devices=[]):
                head = kind(kind.config_type(**values), encoder=self.encoder, fingerprint=self.fingerprint)
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"load_head: {path} must hold a configuration of {kind.name}, got {error}") from error
        try:
            head.load_state_dict(dict(self.state))
        except RuntimeError as error:
            raise ValueError(f"load_head: {path} must hold the weights its header describes, got {error}") from error
        return head.eval()


def read_head(path: str | PathLike[str]) -> HeadFile:
    """What a head's file holds. Raises FileNotFoundError, or ValueError when it is something else or damaged."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"load_head: {path} is missing; `peaksim train` writes it")
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = (file.metadata() or {}).get("peaksim")
    except SafetensorError as error:
        raise ValueError(f"load_head: {path} is not a whole safetensors file ({error})") from error
    try:
        plain = json.loads(header or "")
        kind, version = plain.pop("kind"), plain.pop("format_version")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"load_head: {path} was not written by peaksim (no header)") from error
    if kind != "head" or type(version) is not int or version > FORMAT_VERSION:
        raise ValueError(
            f"load_head: {path} must hold a head of format {FORMAT_VERSION} or lower, got {kind!r} of format {version}"
        )
    try:
        found = HeadFile(**plain, state=state)
    except TypeError as error:
        raise ValueError(f"load_head: {path} has a header that cannot be read ({error})") from error
    for name, wanted in (("head", str), ("config", dict), ("encoder", str), ("fingerprint", str), ("facts", dict)):
        held = getattr(found, name)
        if not isinstance(held, wanted):
            raise ValueError(
                f"load_head: {path} must have a header whose {name} is a {wanted.__name__}, got {type(held).__name__}"
            )
    return found


def shipped_head(name: str, model: str = "scenes") -> Path:
    """Path of a head that comes with the package. Raises FileNotFoundError naming those that do."""
    path = _shipped_folder(model) / f"{name}.safetensors"
    if not path.is_file():
        found = ", ".join(file.stem for file in shipped_heads(model)) or "none"
        raise FileNotFoundError(
            f"{name}: no head of this name is shipped for {model!r} (there are: {found}); train one with "
            "`peaksim train` and give its path"
        )
    return path


def shipped_heads(model: str = "scenes") -> list[Path]:
    """Paths of all heads that come with the package for a model, by name."""
    return sorted(_shipped_folder(model).glob("*.safetensors"))


def _shipped_folder(model: str) -> Path:
    return Path(str(files("engine"))) / "assets" / model / "heads"


def check_belongs(who: str, head: StoredHead, fingerprint: str) -> None:
    """Raise ValueError when head and features come from different encoders; an empty fingerprint fits all."""
    if head.fingerprint and fingerprint and head.fingerprint != fingerprint:
        raise ValueError(
            f"{who} must come from the encoder the head was trained on, {head.encoder or 'unnamed'} "
            f"({head.fingerprint}), got those of {fingerprint}; train a head for this encoder with `peaksim train`"
        )
