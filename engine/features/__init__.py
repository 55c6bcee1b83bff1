"""The two data types every encoder makes and every scorer reads, and what a scorer may ask for."""

from engine.features.class_path import ClassPath
from engine.features.needs import Needs, RegionHead, RegionPlan
from engine.features.readout import TextReadout
from engine.features.types import Features, ImageFeatures, TextFeatures, missing

__all__ = [
    "ClassPath",
    "Features",
    "ImageFeatures",
    "Needs",
    "RegionHead",
    "RegionPlan",
    "TextFeatures",
    "TextReadout",
    "missing",
]
