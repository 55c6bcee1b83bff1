"""Tiny CLIP, SigLIP and SigLIP 2 models of transformers with random weights, saved as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers

CONTEXT = 16
SENTENCES = (
    "a photo of two red dogs",
    "the small cat, on the left!",
    "no person and 3 blue cubes",
    "a large ball",
)
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_VISION = {**_TOWER, "hidden_size": 48, "image_size": 32, "patch_size": 8}


def clip_tokenizer() -> Any:
    """Single letters as word pieces; the end token has the highest id, as in CLIP's vocabulary."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!"
    pieces = [piece for letter in letters for piece in (letter, letter + "</w>")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[])


def siglip_tokenizer(folder: Path) -> Any:
    """A small sentencepiece vocabulary in SigLIP's own tokenizer, which drops punctuation and case."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5),
        model_prefix=str(folder / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return transformers.SiglipTokenizer(str(folder / "spiece.model"), model_input_names=["input_ids"])


def gemma_vocabulary() -> dict[str, int]:
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"]
    pieces += list("abcdefghijklmnopqrstuvwxyzABCLTHEFONG0123456789.,!")
    return {piece: number for number, piece in enumerate(pieces)}


def gemma_tokenizer(kind: str) -> Any:
    """Letters in the Gemma tokenizer, as the published SigLIP 2 configures it; it keeps case by itself."""
    return getattr(transformers, kind)(
        vocab=gemma_vocabulary(), merges=[], add_eos_token=True, add_bos_token=False, padding_side="right"
    )


def _randomise(model: Any) -> Any:
    """No weight stays at a neutral start that would hide a skipped step."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in ("logit_scale", "logit_bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(2.5 if name == "logit_scale" else -7.0)
    return model.eval()


def _clip(folder: Path, *, old: bool) -> tuple[Any, Any, Any]:
    words = clip_tokenizer()
    ends = {"eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id, "pad_token_id": 1}
    if old:
        ends["eos_token_id"] = 2
    text = {**_TOWER, **ends, "vocab_size": len(words), "max_position_embeddings": CONTEXT}
    activation = {"hidden_act": "gelu" if old else "quick_gelu"}
    config = transformers.CLIPConfig(
        text_config={**text, **activation}, vision_config={**_VISION, **activation}, projection_dim=24
    )
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return transformers.CLIPModel(config), words, pixels


def _siglip(folder: Path, words: Any) -> tuple[Any, Any, Any]:
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text = {
        **_TOWER,
        **ends,
        "vocab_size": len(words),
        "max_position_embeddings": CONTEXT,
        "projection_size": 48,
    }
    config = transformers.SiglipConfig(text_config=text, vision_config=_VISION)
    return (
        transformers.SiglipModel(config),
        words,
        transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
    )


def _naflex(folder: Path) -> tuple[Any, Any, Any]:
    words = gemma_tokenizer("Siglip2Tokenizer")
    ends = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    text = {
        **_TOWER,
        **ends,
        "vocab_size": len(words),
        "max_position_embeddings": CONTEXT,
        "projection_size": 48,
    }
    vision = {**_TOWER, "hidden_size": 48, "num_patches": 16, "patch_size": 8}
    config = transformers.Siglip2Config(text_config=text, vision_config=vision)
    pixels = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
    return transformers.Siglip2Model(config), words, pixels


FAMILIES = {
    "clip": lambda folder: _clip(folder, old=False),
    "clip-old": lambda folder: _clip(folder, old=True),
    "siglip": lambda folder: _siglip(folder, siglip_tokenizer(folder)),
    "siglip2": lambda folder: _siglip(folder, gemma_tokenizer("GemmaTokenizer")),
    "siglip2-naflex": _naflex,
}


def write_folder(folder: Path, family: str) -> Path:
    """Model, tokenizer and image processor of a family, as transformers saves them."""
    model, words, pixels = FAMILIES[family](folder)
    for part in (_randomise(model), words, pixels):
        part.save_pretrained(folder)
    return folder
