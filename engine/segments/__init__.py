"""Captions in: object–attribute segments with offsets, counts and negation."""

from engine.segments.base import Segment, Segmenter
from engine.segments.splitters import RulesSegmenter, SpacySegmenter, get_segmenter

__all__ = ["RulesSegmenter", "Segment", "Segmenter", "SpacySegmenter", "get_segmenter"]
