"""Where an open_clip model comes from: a tag, a hub name, a local folder or a local checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from engine.encoders.hub import cached_file, not_there, why_unreachable
from engine.encoders.open_clip_checkpoints import SUFFIXES, Checkpoint, choose_activation, read_checkpoint
from engine.encoders.settings import part_of, read_object, three_numbers
from engine.images import Interpolation

CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
)
_PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode", "fill_color")
PREPROCESSING: dict[str, dict[str, Any]] = {
    "clip": {
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "std": (0.26862954, 0.26130258, 0.27577711),
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    },
    "siglip": {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "resize_mode": "squash"},
    "pe": {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear", "resize_mode": "squash"},
}


@dataclass(frozen=True)
class Source:
    """Everything that makes an open_clip model, before it is built.

    Attributes:
        architecture: open_clip's name, or the folder or hub name that holds the configuration.
        config: open_clip's model configuration, its `quick_gelu` settled.
        preprocess: mean, std, interpolation, resize_mode and fill_color.
        checkpoint: the weights.
        folder: where a local checkpoint lies, None for what came from the hub.
    """

    architecture: str
    config: dict[str, Any]
    preprocess: dict[str, Any]
    checkpoint: Checkpoint
    folder: Path | None


def find_source(reference: str, *, activation: str | None = None, preprocess: str | None = None) -> Source:
    """Find what `reference` (the part after `open_clip:`) means.

    Args:
        reference: `<arch>/<tag>`, `<arch>/<path>`, `hf-hub:<owner>/<name>`, or a local folder with
            `open_clip_config.json` and weights.
        activation: `"gelu"` or `"quick_gelu"`, where a path leaves it open.
        preprocess: a tag of the architecture or `"clip"`, `"siglip"`, `"pe"`, where a path leaves it open.

    Raises:
        ValueError: an unknown architecture or tag, or what is left open or contradictory.
        FileNotFoundError: a missing local file.
    """
    import open_clip

    if reference.startswith("hf-hub:"):
        return _from_hub(reference.removeprefix("hf-hub:"), activation, preprocess)
    folder = Path(reference.removeprefix("local-dir:")).expanduser()
    if reference.startswith("local-dir:") or folder.is_dir():
        return _from_folder(folder, activation, preprocess)
    architecture, _, weights = reference.partition("/")
    if architecture not in open_clip.list_models():
        raise ValueError(_unknown_architecture(reference, architecture, open_clip.list_models()))
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if not weights:
        shown = ", ".join(tags) or "none"
        raise ValueError(
            f"open_clip: 'open_clip:{architecture}' names no weights; append /<tag or path> (tags: {shown})"
        )
    if open_clip.pretrained.is_pretrained_cfg(architecture, weights):
        return _from_tag(architecture, weights, activation, preprocess)
    path = Path(weights).expanduser()
    if not (path.exists() or path.suffix in SUFFIXES or "/" in weights or "\\" in weights):
        shown = ", ".join(tags) or "none"
        raise ValueError(f"open_clip: {weights!r} is neither a tag of {architecture} nor a path; tags: {shown}")
    return _from_path(architecture, path, activation, preprocess)


def _from_path(architecture: str, path: Path, activation: str | None, preprocess: str | None) -> Source:
    import open_clip

    config = deepcopy(open_clip.get_model_config(architecture))
    checkpoint = read_checkpoint(path)
    twin = f"{architecture}-quickgelu" in open_clip.list_models()
    chosen = choose_activation(architecture, config, checkpoint, activation, twin=twin)
    config["quick_gelu"] = chosen == "quick_gelu"
    rules = _preprocess_of_path(architecture, checkpoint, preprocess)
    return Source(architecture, config, rules, checkpoint, path.parent)


def _from_tag(architecture: str, tag: str, activation: str | None, preprocess: str | None) -> Source:
    import open_clip

    who = f"open_clip:{architecture}/{tag}"
    if preprocess is not None:
        raise ValueError(f"{who}: a tag brings its own preprocessing, got preprocess={preprocess!r} as well")
    facts = open_clip.get_pretrained_cfg(architecture, tag)
    # The tag knows what its weights were trained with; where the architecture says otherwise open_clip warns.
    quick_gelu = bool(facts.get("quick_gelu", False))
    _refuse_other_activation(who, activation, quick_gelu)
    config = deepcopy(open_clip.get_model_config(architecture))
    config["quick_gelu"] = quick_gelu
    repository, _, name = str(facts.get("hf_hub") or "").rpartition("/")
    # Some tags lie elsewhere, and one attempt is all that open_clip makes there.
    reason = why_unreachable() if repository else None
    path = _download(who, repository, name, lambda: open_clip.download_pretrained(facts), reason)
    return Source(architecture, config, _preprocess_facts(who, facts), read_checkpoint(path), None)


def _from_hub(name: str, activation: str | None, preprocess: str | None) -> Source:
    from open_clip.pretrained import download_pretrained_from_hf

    who = f"open_clip:hf-hub:{name}"
    reason = why_unreachable()
    config_path = _download(
        who, name, CONFIG_FILE, lambda: download_pretrained_from_hf(name, filename=CONFIG_FILE), reason
    )
    weights = _download(who, name, "", lambda: download_pretrained_from_hf(name), reason)
    content = read_object(who, config_path)
    return _from_config(who, name, content, read_checkpoint(weights), (activation, preprocess), None)


def _from_folder(folder: Path, activation: str | None, preprocess: str | None) -> Source:
    who = f"open_clip:{folder}"
    config_path = folder / CONFIG_FILE
    if not config_path.is_file():
        raise FileNotFoundError(
            f"{who}: {config_path} is missing; a folder must hold it beside the weights. For a bare "
            "checkpoint say 'open_clip:<arch>/<path>'"
        )
    known = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    found = known or sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not found:
        raise FileNotFoundError(f"{who}: the weights are missing: {folder} holds none of {', '.join(WEIGHT_FILES)}")
    if not known and len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{who}: which weights are meant? The folder holds {names}; keep one")
    content = read_object(who, config_path)
    return _from_config(who, str(folder), content, read_checkpoint(found[0]), (activation, preprocess), folder)


def _from_config(
    who: str,
    architecture: str,
    content: Mapping[str, Any],
    checkpoint: Checkpoint,
    stated: tuple[str | None, str | None],
    folder: Path | None,
) -> Source:
    for key in ("model_cfg", "preprocess_cfg"):
        if key not in content:
            raise ValueError(f"{who}: {CONFIG_FILE} must state {key!r}, got {', '.join(map(repr, content))}")
    where = f"{who}: {CONFIG_FILE}"
    model = part_of(where, content, "model_cfg")
    for key in ("vision_cfg", "text_cfg"):
        part_of(f"{where}, model_cfg,", model, key)
    width = model.get("embed_dim")
    if type(width) is not int or width < 1:
        raise ValueError(f"{where}, model_cfg, must state 'embed_dim' as a positive integer, got {width!r}")
    activation, preprocess = stated
    if preprocess is not None:
        raise ValueError(f"{who}: {CONFIG_FILE} states the preprocessing, got preprocess={preprocess!r} as well")
    config = deepcopy(content["model_cfg"])
    _refuse_other_activation(who, activation, bool(config.get("quick_gelu")))
    rules = _preprocess_facts(f"{where}, preprocess_cfg", part_of(where, content, "preprocess_cfg"))
    return Source(architecture, config, rules, checkpoint, folder)


def _preprocess_of_path(architecture: str, checkpoint: Checkpoint, stated: str | None) -> dict[str, Any]:
    """Preprocessing of bare weights: stated, in the sidecar, or what all tags of the architecture share."""
    import open_clip

    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if stated is not None:
        if stated not in PREPROCESSING and stated not in tags:
            known = ", ".join([*PREPROCESSING, *tags])
            raise ValueError(f"open_clip: preprocess must be one of {known}, got {stated!r}")
        rules = PREPROCESSING.get(stated) or open_clip.get_pretrained_cfg(architecture, stated)
        return _preprocess_facts("open_clip", rules)
    in_file = checkpoint.facts.get("preprocess_cfg")
    if isinstance(in_file, Mapping):
        return _preprocess_facts(f"open_clip: preprocess_cfg beside {checkpoint.path}", in_file)
    if "preprocess" in checkpoint.facts:
        name = checkpoint.facts["preprocess"]
        if not isinstance(name, str) or name not in PREPROCESSING:
            known = ", ".join(map(repr, PREPROCESSING))
            raise ValueError(f"open_clip: preprocess beside {checkpoint.path} must be one of {known}, got {name!r}")
        return _preprocess_facts("open_clip", PREPROCESSING[name])
    variants = [_preprocess_facts("open_clip", open_clip.get_pretrained_cfg(architecture, tag)) for tag in tags]
    if variants and all(variant == variants[0] for variant in variants):
        return variants[0]
    reason = "its tags differ in theirs" if variants else "open_clip lists no tag of it"
    raise ValueError(
        f"open_clip: nothing says how images were prepared for {checkpoint.path}: {reason} ({architecture}). "
        f"Append '?preprocess=<one of {', '.join([*PREPROCESSING, *tags])}>', or put {CONFIG_FILE} beside it"
    )


def _preprocess_facts(where: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Mean, std, interpolation, resize_mode and fill_color; `where` they stand begins the message about a wrong one."""
    merged = {
        **PREPROCESSING["clip"],
        **{key: content[key] for key in _PREPROCESS_KEYS if content.get(key) is not None},
    }
    merged.setdefault("fill_color", 0)
    for key in ("mean", "std"):
        value = merged[key]
        # A plain number is one for all colours, as open_clip has it.
        value = (value,) * 3 if isinstance(value, int | float) else value
        merged[key] = three_numbers(where, key, value, positive=key == "std")
    if merged["interpolation"] not in get_args(Interpolation):
        known = ", ".join(map(repr, get_args(Interpolation)))
        raise ValueError(f"{where}: interpolation must be one of {known}, got {merged['interpolation']!r}")
    fill = merged["fill_color"]
    if type(fill) is not int or not 0 <= fill <= 255:
        raise ValueError(f"{where}: fill_color must be a whole number 0..255, got {fill!r}")
    return merged


def _refuse_other_activation(who: str, stated: str | None, quick_gelu: bool) -> None:
    own = "quick_gelu" if quick_gelu else "gelu"
    if stated not in (None, own):
        raise ValueError(f"{who}: these weights were trained with {own}, got activation={stated!r}")


def _download(who: str, repository: str, name: str, fetch: Callable[[], str], reason: str | None) -> Path:
    """The file as `fetch` gives it, or as it was fetched before where the hub is out of reach for a `reason`.

    An empty `name` is the weights under any of the names that open_clip gives them.
    """
    instead = "'open_clip:<arch>/<path>' or 'open_clip:<folder>'"
    if reason is not None:
        # open_clip prefers the safe form of a file, where there is one.
        names = (f"{name[:-4]}.safetensors", name) if name.endswith((".bin", ".pth")) else (name,)
        found = cached_file(repository, names if name else WEIGHT_FILES)
        if found is None:
            what = f"{'settings' if name == CONFIG_FILE else 'weights'} of {repository}"
            raise not_there(who, what, reason, instead)
        return found
    try:
        return Path(fetch())
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"{who}: the weights are not on this machine and could not be fetched ({error}); without a network "
            f"load them by path: {instead}"
        ) from error


def buildable(who: str, source: Source) -> dict[str, Any]:
    """The configuration with the settings of a Hugging Face text tower on this machine, where it has one.

    open_clip would ask the hub for them each time, also for a local checkpoint.

    Raises:
        OSError: they are not here, and the hub cannot or must not be asked.
    """
    name = source.config["text_cfg"].get("hf_model_name")
    if not name or Path(name).is_dir():
        return source.config
    reason = why_unreachable() if source.folder is None else "a local checkpoint never touches the network"
    if reason is None:
        return source.config
    found = cached_file(name, ("config.json",))
    if found is None:
        raise not_there(who, f"settings of the text tower {name}", reason, "state their folder as hf_model_name")
    return {**source.config, "text_cfg": {**source.config["text_cfg"], "hf_model_name": str(found.parent)}}


def _unknown_architecture(reference: str, architecture: str, known: list[str]) -> str:
    close = difflib.get_close_matches(architecture, known, n=3) or ["open_clip.list_models()"]
    return (
        f"open_clip: {reference!r} names neither a folder nor an architecture of open_clip ({architecture!r} "
        f"is unknown); nearest: {', '.join(close)}"
    )
