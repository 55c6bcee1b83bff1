"""A tiny embedded model of random weights, written as a folder that `scenes:<folder>` reads."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.encoders.registry import load_encoder
from engine.encoders.scenes import ScenesEncoder, save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig

CONFIG = ScenesModelConfig(
    image_size=32, patch_size=16, width=32, heads=2, image_layers=2, text_layers=2, stem_width=16, embed_dim=16
)


def write_folder(folder: Path) -> str:
    """The name of the model, to be loaded by."""
    shipped = load_encoder("scenes", device="cpu")
    assert isinstance(shipped, ScenesEncoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = ScenesModel(CONFIG)
    with torch.no_grad():
        for parameter in model.image.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    save_scenes(folder, model, shipped.tokenizer.words)
    return f"scenes:{folder}"
