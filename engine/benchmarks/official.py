"""The official benchmarks by name: who reads them, and where their files lie below one folder of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal

from engine.choices import OnMissing
from engine.datasets.aro import read_order, read_vg_attribution, read_vg_relation
from engine.datasets.base import Dataset, RetrievalDataset
from engine.datasets.bivlc import read_bivlc
from engine.datasets.negbench import read_negbench_mcq, read_negbench_retrieval
from engine.datasets.sugarcrepe import read_sugarcrepe
from engine.datasets.winoground import read_winoground

FilePath = str | PathLike[str]


@dataclass(frozen=True)
class Official:
    """A benchmark's reader, the places of its annotations and images below the data folder, and what the former is."""

    read: Callable[..., Dataset | RetrievalDataset]
    annotations: str
    images: str
    form: Literal["file", "folder", "file or folder"] = "file"


_COCO = "coco/val2017"
OFFICIAL: Mapping[str, Official] = {
    "sugarcrepe": Official(read_sugarcrepe, "sugarcrepe", _COCO, "file or folder"),
    "winoground": Official(read_winoground, "winoground", "winoground/images", "folder"),
    "bivlc": Official(read_bivlc, "bivlc/bivlc.csv", "bivlc/images"),
    "vg_relation": Official(read_vg_relation, "aro/visual_genome_relation.json", "aro/images"),
    "vg_attribution": Official(read_vg_attribution, "aro/visual_genome_attribution.json", "aro/images"),
    "coco_order": Official(partial(read_order, name="coco_order"), "aro/coco_karpathy_test.json", "coco"),
    "flickr30k_order": Official(partial(read_order, name="flickr30k_order"), "aro/flickr30k_test.json", "flickr30k"),
    "negbench_mcq": Official(read_negbench_mcq, "negbench/COCO_val_mcq_llama3.1_rephrased.csv", _COCO),
    "negbench_mcq_voc": Official(
        partial(read_negbench_mcq, name="negbench_mcq_voc"),
        "negbench/VOC2007_mcq_llama3.1_rephrased.csv",
        "voc2007",
    ),
    "negbench_mcq_synthetic": Official(
        partial(read_negbench_mcq, name="negbench_mcq_synthetic"),
        "negbench/synthetic_mcq_llama3.1_rephrased.csv",
        "negbench/images",
    ),
    "negbench_retrieval": Official(
        read_negbench_retrieval,
        "negbench/COCO_val_negated_retrieval_llama3.1_rephrased_affneg_true.csv",
        _COCO,
    ),
    "negbench_retrieval_plain": Official(
        partial(read_negbench_retrieval, name="negbench_retrieval_plain"),
        "negbench/COCO_val_retrieval.csv",
        _COCO,
    ),
}


def read_official(
    name: str,
    data: FilePath | None = None,
    *,
    annotations: FilePath | None = None,
    images: FilePath | None = None,
    pictures: bool = True,
    on_missing: OnMissing = "error",
    tags: FilePath | None = None,
) -> Dataset | RetrievalDataset:
    """A benchmark from its official files.

    Arguments
    ---------
    name: a key of ``OFFICIAL``.
    data: the folder below which annotations and images lie at the places ``OFFICIAL`` names.
    annotations, images: their own places, in place of those below ``data``.
    pictures: False reads the texts alone, for scorers that look at no picture; ``images`` is then not needed.
    on_missing: ``"error"`` or ``"skip"`` (leave out items whose image is missing, and say so).
    tags: of Winoground, its ``new_tag_assignments.json``.

    Raises ValueError for another name, a place that is not given, a file in place of a folder or the reverse, and what
    the readers raise;
    FileNotFoundError for annotations or a folder of images that are not there.
    """
    if name not in OFFICIAL:
        raise ValueError(f"benchmark: must be one of {', '.join(OFFICIAL)}, got {name!r}")
    place = OFFICIAL[name]
    wanted = "annotations and images" if pictures else "annotations"
    if data is None and (annotations is None or (pictures and images is None)):
        raise ValueError(f"{name}: needs its {wanted}, or a data folder that holds them; the files are yours to bring")
    if tags is not None and name != "winoground":
        raise ValueError(f"{name}: tags are Winoground's, got {tags}")
    text_place = Path(data or "", place.annotations) if annotations is None else Path(annotations)
    if not text_place.exists():
        raise FileNotFoundError(f"{name}: its annotations must be at {text_place}, there is nothing")
    found = "folder" if text_place.is_dir() else "file"
    if found not in place.form:
        raise ValueError(f"{name}: its annotations must be a {place.form}, got the {found} {text_place}")
    if tags is not None and Path(tags).is_dir():
        raise ValueError(f"{name}: its tags must be a file, got the folder {tags}")
    picture_place = None if images is None else Path(images)
    if pictures and images is None:
        picture_place = Path(data or "", place.images)
    options: dict[str, FilePath] = {} if tags is None else {"tags": tags}
    return place.read(text_place, picture_place, on_missing=on_missing, **options)
