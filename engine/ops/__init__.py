"""The ops: one file each, with checks, torch registration, dispatch, gradient and the public function."""

from engine.ops.crop_batch import crop_batch
from engine.ops.max_sim import MaxSimOutput, max_sim, max_sim_pairs
from engine.ops.window_attention import window_attention

__all__ = ["MaxSimOutput", "crop_batch", "max_sim", "max_sim_pairs", "window_attention"]
