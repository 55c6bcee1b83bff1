"""TROHN (Miranda et al. 2024, "BiVLC"): captions with hard negative captions, and pictures of those, as training data.

On disk, CSV with a header in any column order: `image_id`, `caption`, `negative_caption` (TROHN-Text) and
`negative_image` (TROHN-Img). `image` or `filename` may stand for `image_id`; further columns are not read.
"""

from __future__ import annotations

from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedImages, CaptionedItem, Problem, usable
from engine.datasets.files import FilePath, ImageFolder, read_csv

IMAGE_COLUMNS = ("image_id", "image", "filename")
TEXT_COLUMNS = ("caption", "negative_caption")
NEGATIVE_IMAGE = "negative_image"
# COCO's pictures are named by their ids, written with so many digits.
COCO_DIGITS = 12


def read_trohn(rows: FilePath, images: FilePath, negative_images: FilePath | None = None) -> CaptionedImages:
    """Captions with their hard negatives, in file order; ids are row numbers, the first is `"0"`.

    Args:
        rows: the CSV file.
        images: the folder of the pictures. A bare number names COCO's file of that id.
        negative_images: the folder of the pictures of the negative captions; the column `negative_image` must then be
            there. By default they are looked for in `images` when the file has that column.

    Returns:
        items; rows with a missing picture or an empty text are in the problems.

    Raises:
        FileNotFoundError: the file or a folder is not there, or not one of the pictures.
        ValueError: naming the columns that are missing, a damaged file, or nothing to train on.
    """
    wanted = TEXT_COLUMNS if negative_images is None else (*TEXT_COLUMNS, NEGATIVE_IMAGE)
    table = read_csv(rows, wanted)
    if not table:
        raise ValueError(f"read_trohn: {rows} must hold at least one row")
    column = next((name for name in IMAGE_COLUMNS if name in table[0]), None)
    if column is None:
        raise ValueError(f"read_trohn: {rows} must have a column {' or '.join(IMAGE_COLUMNS)}, got {list(table[0])}")
    finder = ImageFolder(images, "read_trohn")
    # Generated pictures carry the names of those they are negatives of: a finder of their own.
    others = ImageFolder(negative_images or images, "read_trohn") if NEGATIVE_IMAGE in table[0] else None
    items, problems = [], []
    for number, row in enumerate(table):
        lacking = [name for name in TEXT_COLUMNS if not row[name].strip()]
        if lacking:
            problems.append(Problem(f"{rows} row {number}", f"{lacking[0]} is empty"))
            continue
        refs = [_find(finder, row[column])]
        if others is not None:
            refs.append(_find(others, row[NEGATIVE_IMAGE]))
        gone = [ref.name for ref in refs if ref.path is None]
        if gone:
            problems.append(Problem(f"{rows} row {number}", f"there is no image {gone[0]!r}"))
            continue
        caption, negative = (row[name].strip() for name in TEXT_COLUMNS)
        negative_image = refs[1] if others is not None else None
        items.append(CaptionedItem(str(number), refs[0], (caption,), (negative,), negative_image))
    finder.check("skip")
    if others is not None:
        others.check("skip")
    return usable("read_trohn", items, problems)


def _find(finder: ImageFolder, cell: str) -> ImageRef:
    name = cell.strip()
    if name.isdecimal():
        name = f"{int(name):0{COCO_DIGITS}d}.jpg"
    return ImageRef(name, finder.find(name) if name else None)
