"""The commands that look at pictures and at the installation: score, explain, classify, models, doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from engine.cli.options import OptionalFile, Shared, WithModel, WithScorer, captions, check_text, image_files, wants_bar
from engine.cli.outputs import check_apart, check_file
from engine.cli.tables import report, show_json, show_line, show_table, show_text_table

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.features import ImageFeatures
    from engine.images import ImageFailure
    from engine.scorers.base import Scorer

# Captions longer than this are numbered in the head of a table and spelled out below it.
HEAD_LENGTH = 24
DRAWN = (".png", ".jpg", ".jpeg")

Images = Annotated[
    Positional[tuple[str, ...]],
    arg(metavar="IMAGE...", help="Picture files, or folders of them.", help_behavior_hint="(required)"),
]
Texts = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="CAPTION", help="A caption; repeatable.")]


@dataclass(frozen=True, kw_only=True)
class Score(WithScorer):
    """Score pictures against captions."""

    images: Images
    text: Texts = ()
    text_file: OptionalFile = None
    """File of captions, one a line."""
    pairs: bool = False
    """Score picture i with caption i alone."""
    output: Literal["similarity", "logit", "probability"] = "similarity"
    """What a number means."""

    def run(self) -> int:
        """Print the scores; 1 when a picture could not be read."""
        texts = captions(self.text, self.text_file)
        scorer, files = self.chosen(), image_files(self.images)
        if self.pairs and len(files) != len(texts):
            raise ValueError(f"--pairs needs as many captions as pictures, got {len(texts)} and {len(files)}")
        engine = self.engine(segmenter=self.segmenter)
        features, failures = read_images(engine, files, scorer, self.batch_size)
        if self.pairs:
            read = set(features.ids or ())
            texts = [text for file, text in zip(files, texts, strict=True) if str(file) in read]
        scores = engine.score(
            features, texts, scorer=scorer, pairs=self.pairs, output=self.output, batch_size=self.batch_size
        )
        names = list(features.ids or ())
        if self.json:
            show_json(
                {
                    "model": engine.spec.name,
                    "scorer": repr(scorer),
                    "output": self.output,
                    "images": names,
                    "texts": texts,
                    "scores": scores.tolist(),
                    "failures": [asdict(failure) for failure in failures],
                }
            )
        elif self.pairs:
            rows = [(n, t, number(s)) for n, t, s in zip(names, texts, scores.tolist(), strict=True)]
            show_text_table(("image", "caption", f"{scorer.name} {self.output}"), rows)
        else:
            show_matrix(names, texts, scores.tolist(), title=f"{scorer.name} {self.output}")
        return report_failures(failures)


@dataclass(frozen=True, kw_only=True)
class Explain(WithScorer):
    """Show which words found which region of a picture."""

    image: Annotated[Positional[str], arg(metavar="IMAGE", help="A picture file.")]
    text: Annotated[str, arg(metavar="CAPTION")]
    """The caption."""
    scorer: str = "sgi"
    """Way of scoring: global, max_sim, max_sim_head or sgi."""
    draw: OptionalFile = None
    """Save the picture with its boxes here (.png or .jpg)."""

    def run(self) -> int:
        """Print the matches and save the picture when asked to."""
        check_text("--text", [self.text])
        check_file("--draw", self.draw, suffixes=DRAWN)
        check_apart([("--draw", self.draw)], [("the picture", Path(self.image))])
        scorer = self.chosen()
        explanation = self.engine(segmenter=self.segmenter).explain(self.image, self.text, scorer=scorer)
        if self.draw is not None:
            explanation.draw(self.draw)
        if self.json:
            matches = [asdict(match) for match in explanation.matches]
            show_json(
                {
                    "image": self.image,
                    "text": explanation.text,
                    "scorer": repr(scorer),
                    "score": explanation.total,
                    "matches": matches,
                    "drawn": None if self.draw is None else str(self.draw),
                }
            )
            return 0
        rows = [
            (match.text, number(match.score), f"{match.weight:.3f}", " ".join(map(str, match.box)))
            for match in explanation.matches
        ]
        show_table(("words", "score", "weight", "box x0 y0 x1 y1"), rows, title=f"{self.image}: {explanation.text}")
        show_line(f"{scorer.name} score {number(explanation.total)}")
        if self.draw is not None:
            show_line(f"saved {self.draw}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Classify(WithModel):
    """Say which label fits each picture best, without training."""

    images: Images
    label: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="LABEL")]
    """A label; repeatable."""
    template: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="SENTENCE")] = ()
    """Sentence a label is put into, {} standing for it; repeatable, their embeddings are averaged."""
    top: int = 3
    """Labels shown for each picture."""

    def run(self) -> int:
        """Print the best labels; 1 when a picture could not be read."""
        if self.top < 1:
            raise ValueError(f"--top must be at least 1, got {self.top}")
        check_text("--label", self.label)
        check_text("--template", self.template)
        from engine.encoders.captions import TEMPLATES
        from engine.scorers.registry import get_scorer

        files = image_files(self.images)
        engine = self.engine()
        features, failures = read_images(engine, files, get_scorer("global"), self.batch_size)
        shares = engine.classify(features, self.label, templates=self.template or TEMPLATES, batch_size=self.batch_size)
        names = features.ids or ()
        values, places = shares.topk(min(self.top, len(self.label)), dim=1)
        best = [
            [(self.label[place], value) for place, value in zip(row_places, row_values, strict=True)]
            for row_places, row_values in zip(places.tolist(), values.tolist(), strict=True)
        ]
        if self.json:
            images = [
                {"image": name, "labels": [{"label": label, "probability": value} for label, value in row]}
                for name, row in zip(names, best, strict=True)
            ]
            show_json(
                {
                    "model": engine.spec.name,
                    "images": images,
                    "failures": [asdict(failure) for failure in failures],
                }
            )
        else:
            header = ("image", *(f"{place + 1}." for place in range(len(best[0]))))
            rows = [
                (name, *(f"{label} {100 * value:.1f} %" for label, value in row))
                for name, row in zip(names, best, strict=True)
            ]
            show_text_table(header, rows)
        return report_failures(failures)


@dataclass(frozen=True, kw_only=True)
class Models(Shared):
    """List the encoders and what each of them offers, or look at one."""

    name: Annotated[
        Positional[str],
        arg(metavar="[NAME]", help="Load this model and state its own facts.", help_behavior_hint="(optional)"),
    ] = ""

    def run(self) -> int:
        """Print the families of encoders, or the facts of one model."""
        if self.name:
            return self._run_one()
        from engine.encoders.registry import families

        if self.json:
            show_json([asdict(family) for family in families()])
            return 0
        rows = []
        for family in families():
            row = (taps_in_words(family.taps), family.context_length, family.probability, family.text_rules)
            rows.append((family.example, family.architectures, *row))
        show_text_table(("--model", "what", "patch taps", "context", "probability", "text"), rows)
        show_line("A folder that `peaksim export` wrote is a --model too: name its path.")
        return 0

    def _run_one(self) -> int:
        from engine.engine import load

        facts = asdict(load(self.name, device="cpu").spec)
        if self.json:
            show_json(facts)
            return 0
        facts["taps"] = taps_in_words(facts["taps"])
        show_text_table(("fact", self.name), [(name.replace("_", " "), str(value)) for name, value in facts.items()])
        return 0


@dataclass(frozen=True, kw_only=True)
class Doctor(Shared):
    """Say what this installation can do here, and how to get what it lacks."""

    def run(self) -> int:
        """Print the report of ``engine.doctor``."""
        from engine.cli.diagnosis import show_report
        from engine.doctor import examine

        found = examine()
        if self.json:
            show_json(asdict(found))
        else:
            show_report(found)
        return 0


def taps_in_words(taps: Mapping[str, bool]) -> str:
    """The patch taps, those outside the text's space marked."""
    return ", ".join(f"{tap}{'' if aligned else ' (not aligned)'}" for tap, aligned in taps.items()) or "none"


def read_images(
    engine: Engine, files: Sequence[Path], scorer: Scorer, batch_size: int
) -> tuple[ImageFeatures, list[ImageFailure]]:
    """Features of the files that can be read, and what is wrong with the others."""
    failures: list[ImageFailure] = []
    features = engine.encode_images(
        list(files),
        scorer=scorer,
        batch_size=batch_size,
        progress=wants_bar(),
        on_error=failures.append,
        ids=[str(file) for file in files],
    )
    return features, failures


def report_failures(failures: Sequence[ImageFailure]) -> int:
    """Name what could not be read on standard error; the exit code."""
    for failure in failures:
        report(f"{failure.path}: {failure.reason}")
    if failures:
        report(f"{len(failures)} picture{'s' if len(failures) > 1 else ''} could not be read")
    return 1 if failures else 0


def show_matrix(names: Sequence[str], texts: Sequence[str], scores: Sequence[Sequence[float]], *, title: str) -> None:
    """One row an image and one column a caption, or one row a caption when there is a single image."""
    if len(names) == 1:
        rows = [(text, number(score)) for text, score in zip(texts, scores[0], strict=True)]
        show_table(("caption", names[0]), rows, title=title)
        return
    spelled = all(len(text) <= HEAD_LENGTH for text in texts)
    heads = list(texts) if spelled else [f"text {column}" for column in range(len(texts))]
    lines = [(name, *map(number, row)) for name, row in zip(names, scores, strict=True)]
    show_table(("image", *heads), lines, title=title)
    if not spelled:
        for head, text in zip(heads, texts, strict=True):
            show_line(f"{head}: {text}")


def number(value: float) -> str:
    """Four digits after the point."""
    return f"{value:.4f}"
