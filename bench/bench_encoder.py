"""Exported encoders against torch eager and `torch.compile`, in turn: `pytest bench/bench_encoder.py`.

The embedded model with its weights, and a ViT-B/32 of random ones. Global embeddings of pictures and of captions at
batches of 1, 8 and 64; end to end, `Engine.score` of pictures and captions with every scorer. Results are checked first
against eager float32, int8 within what it is meant to lose.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import engine
from bench.paired import Paired
from engine.encoders.base import Encoder
from engine.encoders.exported import ExportedEncoder, load_exported
from engine.encoders.registry import load_encoder
from engine.encoders.tracing import traceable_towers
from engine.export.folder import ExportSettings, export_model
from engine.scenes.items import controlled_items
from tests.tiny_open_clip import write_config_folder

BATCHES = (1, 8, 64)
HEADS = ("max_sim_head", "peakpatch")
VIT_B_32: dict[str, Any] = {
    "embed_dim": 512,
    "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12},
}
# One minute of a whole process is long for a benchmark of the large one: it is left to who asks for it.
MODELS = ("scenes", *(["vit_b_32"] if os.environ.get("PEAKSIM_BENCH_LARGE") else []))
