"""The ops: one file each, with checks, torch registration, dispatch, gradient and the public function."""

from engine.ops.centroid import centroid
from engine.ops.crop_batch import crop_batch
from engine.ops.max_sim import MaxSimOutput, max_sim, max_sim_pairs
from engine.ops.max_sim_contrastive import max_sim_contrastive
from engine.ops.max_sim_int8 import max_sim_int8
from engine.ops.max_sim_topk import TopKOutput, max_sim_topk
from engine.ops.max_sim_varlen import max_sim_varlen
from engine.ops.peak_patch import AttentionPool, TokenNorm, peak_patch_features
from engine.ops.peak_patch_correct import PairFeatures, peak_patch_correct, peak_patch_pairs
from engine.ops.quantize import QuantizedTokens, dequantize, quantize
from engine.ops.window_attention import window_attention

__all__ = [
    "AttentionPool",
    "MaxSimOutput",
    "PairFeatures",
    "QuantizedTokens",
    "TokenNorm",
    "TopKOutput",
    "centroid",
    "crop_batch",
    "dequantize",
    "max_sim",
    "max_sim_contrastive",
    "max_sim_int8",
    "max_sim_pairs",
    "max_sim_topk",
    "max_sim_varlen",
    "peak_patch_correct",
    "peak_patch_features",
    "peak_patch_pairs",
    "quantize",
    "window_attention",
]
