"""Draw the curves of trainings of the embedded model: ``python -m bench.scenes_curves OUT.png LOG.jsonl …``.

Left: contrastive loss (mean of the logged steps, in windows of five) and in-batch accuracy. Right: group score of the
global cosine on 100 in-domain items of each category, and R@1 among 300 scenes, wherever the training evaluated itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

WINDOW = 5


def read(path: Path) -> list[dict[str, float]]:
    """The entries of one log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def smoothed(entries: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Samples seen and the mean of ``name`` over windows of entries."""
    chunks = [entries[start : start + WINDOW] for start in range(0, len(entries), WINDOW)]
    return [c[-1]["samples"] for c in chunks], [sum(e[name] for e in c) / len(c) for c in chunks]


def draw(out: Path, logs: list[Path]) -> None:
    """Write the picture."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for number, path in enumerate(logs):
        entries = read(path)
        color = f"C{number}"
        left.plot(*smoothed(entries, "loss"), color=color, label=f"{path.stem}: loss")
        left.plot(*smoothed(entries, "accuracy"), color=color, linestyle=":", label=f"{path.stem}: in-batch accuracy")
        evaluated = [entry for entry in entries if "group_color" in entry]
        seen = [entry["samples"] for entry in evaluated]
        for name, style in (("color", "-"), ("size", "--"), ("material", "-."), ("position", ":")):
            right.plot(seen, [100 * entry[f"group_{name}"] for entry in evaluated], style, color=color)
        right.plot(seen, [100 * entry["image_to_text_r1"] for entry in evaluated], "o-", color=color, alpha=0.4)
    left.set(xlabel="samples seen", ylim=(0, 5), title="training")
    left.legend(fontsize="small")
    right.set(xlabel="samples seen", ylabel="%", ylim=(0, 100), title="global cosine: R@1 of 300 (dots), group scores")
    right.axhline(100 / 6, color="gray", linewidth=0.8)
    right.annotate("group score of chance", (0, 100 / 6), color="gray", fontsize="small", va="bottom")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
