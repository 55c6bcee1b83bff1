"""Tiny open_clip models of every family with random weights, written as folders that open_clip reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models import register_model
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.encoders.open_clip import OpenClipEncoder, build_model
from engine.encoders.open_clip_checkpoints import Checkpoint
from engine.encoders.open_clip_sources import PREPROCESSING, Source

WORDS = (
    *("a", "photo", "of", "two", "red", "dog", "cat", "cube", "ball", "on", "the", "left", "right", "small"),
    *("large", "no", "person", "and", "blue", "green", "is"),
)
TEXTS = ["a photo of two red dog", "A CAT, on the left!", "no person", "small cube and large ball " * 8]
_VIT = {"image_size": 32, "patch_size": 8, "width": 48, "head_width": 16, "layers": 3}
_TEXT = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 3}
_HUB_TEXT = {
    "context_length": 16,
    "vocab_size": 64,
    "width": 48,
    "heads": 4,
    "layers": 2,
    "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
    "tokenizer_kwargs": {"clean": "canonicalize"},
    "no_causal_mask": True,
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": 1e-6},
}


@register_model
def tiny_vit_siglip(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    return VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=3,
        num_heads=4,
        class_token=False,
        num_classes=kwargs["num_classes"],
        global_pool=kwargs["global_pool"],
    )


@register_model
def tiny_vit_pe_core(pretrained: bool = False, **kwargs: Any) -> Eva:
    return Eva(
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=3,
        num_heads=4,
        attn_type="rope",
        use_pre_transformer_norm=True,
        use_rot_pos_emb=True,
        ref_feat_shape=(4, 4),
        rope_grid_offset=1.0,
        rope_grid_indexing="xy",
        attn_pool_num_heads=4,
        attn_pool_mlp_ratio=4.0,
        num_classes=kwargs["num_classes"],
        global_pool=kwargs["global_pool"],
    )


def _timm(name: str, proj: str | None) -> dict[str, Any]:
    return {"image_size": 32, "timm_model_name": name, "timm_pool": "map", "timm_proj": proj}


CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {"embed_dim": 24, "vision_cfg": _VIT, "text_cfg": _TEXT},
    "clip-quickgelu": {"embed_dim": 24, "quick_gelu": True, "vision_cfg": _VIT, "text_cfg": _TEXT},
    "clip-average": {
        "embed_dim": 24,
        "custom_text": True,
        "vision_cfg": {
            **_VIT,
            "pool_type": "avg",
            "final_ln_after_pool": True,
            "ls_init_value": 0.5,
            "qk_norm": True,
        },
        "text_cfg": {**_TEXT, "pool_type": "eos", "eos_id": 49407},
    },
    "siglip": {
        "embed_dim": 48,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": _timm("tiny_vit_siglip", "none"),
        "text_cfg": _HUB_TEXT,
    },
    "siglip2": {
        "embed_dim": 48,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": _timm("tiny_vit_siglip", "none"),
        "text_cfg": {
            **_HUB_TEXT,
            "hf_tokenizer_name": "timm/ViT-B-16-SigLIP2",
            "act_kwargs": {"approximate": "tanh"},
        },
    },
    "pe": {
        "embed_dim": 24,
        "custom_text": True,
        "vision_cfg": _timm("tiny_vit_pe_core", None),
        "text_cfg": _TEXT,
    },
    "resnet": {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
        "text_cfg": _TEXT,
    },
    "coca": {
        "embed_dim": 24,
        "custom_text": True,
        "vision_cfg": {**_VIT, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
        "text_cfg": {**_TEXT, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {"context_length": 20, "vocab_size": 49408, "width": 24, "heads": 4, "layers": 1},
    },
}
RULES = {"siglip": "siglip", "siglip2": "siglip", "pe": "pe"}


def pictures(count: int = 3) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes = [(40, 64), (64, 40), (50, 50), (90, 20)]
    made = []
    for row in range(count):
        height, width = sizes[row % len(sizes)]
        made.append(Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))
    return made


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words and an end token, as SigLIP's T5 tokenizer; keeps case, so that rules show."""
    pieces = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    for word in (*WORDS, "Cat", "CAT"):
        pieces.setdefault(word, len(pieces))
    core = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", padding_side="right"
    )


def random_model(family: str, seed: int = 0) -> torch.nn.Module:
    """The model of a family; every weight random, none at a neutral start that would hide a skipped step."""
    model = build_model(CONFIGS[family])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in ("logit_scale", "logit_bias"):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.9 * parameter + 0.1 * noise)
    return model.eval()


def write_folder(folder: Path, family: str, seed: int = 0) -> Path:
    """Configuration, weights and (where it has its own) tokenizer of a family, as open_clip writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in random_model(family, seed).state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    rules = PREPROCESSING[RULES.get(family, "clip")]
    config = {"model_cfg": CONFIGS[family], "preprocess_cfg": rules}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    if "hf_tokenizer_name" in CONFIGS[family]["text_cfg"]:
        small_tokenizer().save_pretrained(folder)
    return folder


# The sizes of OpenAI's ViT-B/32.
VIT_B_32: dict[str, Any] = {
    "embed_dim": 512,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12},
}


def vit_b_32() -> OpenClipEncoder:
    """A ViT-B/32 of random weights at its true size, made in memory."""
    source = Source("ViT-B-32", VIT_B_32, {**PREPROCESSING["clip"], "fill_color": 0}, Checkpoint(Path(), {}, {}), None)
    placement = torch.device("cpu"), torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(VIT_B_32)
    return OpenClipEncoder("ViT-B/32", model, source, resize="model", tokenizer=None, placement=placement)


def write_vit_b_32(folder: Path) -> Path:
    """The same as a folder that `open_clip:<folder>` reads."""
    vit_b_32().save(folder)
    return folder


def register(folder: Path) -> None:
    """Make ``tiny-<family>`` architectures of open_clip, for checkpoints given by path."""
    folder.mkdir(parents=True, exist_ok=True)
    for family, config in CONFIGS.items():
        (folder / f"tiny-{family}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
