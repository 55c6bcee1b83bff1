"""COCO's captions (Lin et al. 2014, Chen et al. 2015) as training data, with the categories of the instances file.

On disk, JSON: `images` (`id`, `file_name`) and `annotations` (`image_id`, `caption`); in the instances file
`categories` (`id`, `name`) and `annotations` (`image_id`, `category_id`). Any data in that form will do.
"""

from __future__ import annotations

from typing import Any

from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedImages, CaptionedItem, Problem, usable
from engine.datasets.files import FilePath, ImageFolder, int_field, read_json, text_field


def read_coco(captions: FilePath, images: FilePath, instances: FilePath | None = None) -> CaptionedImages:
    """Pictures with all their captions, in the order of the captions file; ids are COCO's image ids.

    Args:
        captions: the JSON file of captions.
        images: the folder of the pictures.
        instances: the JSON file of instances, from which `present` is taken (sorted names); a picture without any
            instance has none.

    Returns:
        items; pictures that are missing, and those without a caption, are in the problems.

    Raises:
        FileNotFoundError: a file is not there, or not one of the pictures.
        ValueError: a file of another form, or nothing to train on.
    """
    told = _tables(captions, "images", "annotations")
    finder = ImageFolder(images, "read_coco")
    sentences: dict[int, list[str]] = {}
    for row, entry in enumerate(told["annotations"]):
        where = f"read_coco: {captions} annotation {row}"
        text = text_field(entry, "caption", where=where, empty=True).strip()
        sentences.setdefault(int_field(entry, "image_id", where=where), []).extend([text] if text else [])
    present = {} if instances is None else _categories(instances)
    items, problems = [], []
    for row, entry in enumerate(told["images"]):
        where = f"read_coco: {captions} image {row}"
        key, name = int_field(entry, "id", where=where), text_field(entry, "file_name", where=where)
        path = finder.find(name)
        if path is None:
            problems.append(Problem(f"{images}/{name}", "there is no such file"))
        elif not sentences.get(key):
            problems.append(Problem(str(path), f"{captions} has no caption of it"))
        else:
            seen = tuple(sorted(present.get(key, ())))
            items.append(CaptionedItem(str(key), ImageRef(name, path), tuple(sentences[key]), present=seen))
    finder.check("skip")
    return usable("read_coco", items, problems)


def _categories(path: FilePath) -> dict[int, set[str]]:
    """Names of the categories of each image."""
    seen = _tables(path, "categories", "annotations")
    names = {
        int_field(entry, "id", where=f"read_coco: {path} category {row}"): text_field(
            entry, "name", where=f"read_coco: {path} category {row}"
        )
        for row, entry in enumerate(seen["categories"])
    }
    present: dict[int, set[str]] = {}
    for row, entry in enumerate(seen["annotations"]):
        where = f"read_coco: {path} annotation {row}"
        category = int_field(entry, "category_id", where=where)
        if category not in names:
            raise ValueError(f"{where}: category_id must be one of the categories, got {category}")
        present.setdefault(int_field(entry, "image_id", where=where), set()).add(names[category])
    return present


def _tables(path: FilePath, *wanted: str) -> dict[str, list[dict[str, Any]]]:
    """The lists of objects of these names."""
    content = read_json(path)
    for name in wanted:
        rows = content.get(name) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(
                f"read_coco: {path} must be an object with the lists {' and '.join(wanted)}, and {name} is none"
            )
    found: dict[str, list[dict[str, Any]]] = content
    return found
