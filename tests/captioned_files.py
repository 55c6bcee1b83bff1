"""Small COCO, TROHN and WebDataset data on disk, with whatever is wrong in large ones."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CAPTIONS = ("a red cube and a blue ball", "a large green star on a small yellow ring", "a man rides a horse")


def picture(seed: int, size: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def encoded(seed: int, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    picture(seed).save(stream, kind)
    return stream.getvalue()


def write_coco(folder: Path, count: int = 6, *, captions: int = 2) -> tuple[Path, Path, Path]:
    """Captions, folder of pictures, and instances; picture k holds category k % 3 and the next one."""
    images = folder / "images"
    images.mkdir(parents=True)
    told: dict[str, list[dict[str, object]]] = {"images": [], "annotations": []}
    seen: dict[str, list[dict[str, object]]] = {"categories": [], "annotations": []}
    seen["categories"] = [{"id": 10 + k, "name": name} for k, name in enumerate(("dog", "bench", "umbrella", "car"))]
    for key in range(count):
        picture(key).save(images / f"{key:012d}.png")
        told["images"].append({"id": key, "file_name": f"{key:012d}.png"})
        for k in range(captions):
            told["annotations"].append({"image_id": key, "caption": f"{CAPTIONS[key % 3]} ({key} {k}) \n"})
        for k in range(2):
            seen["annotations"].append({"image_id": key, "category_id": 10 + (key + k) % 3})
    for name, value in (("captions", told), ("instances", seen)):
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder / "captions.json", images, folder / "instances.json"


def write_trohn(folder: Path, count: int = 6, *, negative_images: bool = True) -> tuple[Path, Path, Path]:
    """Rows, folder of pictures, and folder of negative pictures of the same names."""
    images, others = folder / "images", folder / "negatives"
    header = ["image_id", "caption", "negative_caption", *(["negative_image"] if negative_images else []), "prompt"]
    rows = []
    for key in range(count):
        name = f"{key:012d}.jpg"
        for place, seed in ((images, key), (others, 100 + key)):
            place.mkdir(parents=True, exist_ok=True)
            picture(seed).save(place / name)
        texts = [f"a red cube {key}", f"a blue cube {key}"]
        rows.append([str(key) if key % 2 else name, *texts, *([name] if negative_images else []), "x"])
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return folder / "rows.csv", images, others


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def sample(key: str, seed: int, **more: bytes) -> dict[str, bytes]:
    """A picture and its caption; further members by ending, `_` for a dot."""
    members = {f"{key}.png": encoded(seed), f"{key}.txt": f"caption {seed}\n".encode()}
    return members | {f"{key}.{ending.replace('_', '.')}": data for ending, data in more.items()}
