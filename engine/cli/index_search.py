"""``peaksim index search``: a table, JSON, or a page of thumbnails."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import UseAppendAction, arg

from engine.cli.commands import Texts, number
from engine.cli.index import Folder, Where
from engine.cli.options import OnDevice, OptionalFile, captions, check_text, scorer_with
from engine.cli.outputs import check_apart, check_file
from engine.cli.tables import show_json, show_line, show_table

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.retrieval.index import Index
    from engine.retrieval.results import Hit
    from engine.scorers.base import Scorer

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Search(OnDevice):
    """Find pictures by captions or by pictures."""

    index: Folder
    text: Texts = ()
    text_file: OptionalFile = None
    """File of captions, one a line."""
    image: Annotated[UseAppendAction[tuple[Path, ...]], arg(metavar="FILE")] = ()
    """A picture to search with; repeatable, in the place of captions."""
    k: int = 10
    """Pictures shown for each query."""
    scorer: str = ""
    """Way of scoring; by default the one that the index keeps vectors for: sgi, max_sim_head, max_sim, else global."""
    option: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """Option of the scorer, repeatable; needs --scorer."""
    candidates: str = "auto"
    """How many pictures the scorer looks at: a number, all, or auto."""
    where: Where = None
    """Condition on the metadata, e.g. "year > 2020 and tag = 'cat'"."""
    explain: bool = False
    """Also say which words found which part of each picture."""
    html: OptionalFile = None
    """Write a page with the pictures found, their scores and the parts that were found."""
    segmenter: str = "auto"
    """What splits captions into segments; see `peaksim score`."""

    def run(self) -> int:
        """Print what was found."""
        check_file("--html", self.html, suffixes=(".html", ".htm"))
        check_apart([("--html", self.html)], [("--image", path) for path in self.image])
        check_text("--where", [self.where] if self.where else [])
        if self.image and (self.text or self.text_file):
            raise ValueError("--image: search with pictures or with captions, got both")
        queries = list(self.image) if self.image else captions(self.text, self.text_file)
        from engine.retrieval.index import Index

        if self.option and not self.scorer:
            raise ValueError("--option: needs --scorer")
        opened = Index.open(self.index)
        model: Engine = self.load(opened.snapshot.manifest.model, segmenter=self.segmenter)
        opened = Index.open(self.index, model=model)
        scorer: str | Scorer = scorer_with(self.scorer, self.option) if self.option else self.scorer or usual(opened)
        found = opened.search(
            queries, self.k, scorer=scorer, candidates=candidates(self.candidates), where=self.where,
            explain=self.explain or self.html is not None,
        )  # fmt: skip
        names = [str(query) for query in queries]
        if self.html is not None:
            from engine.cli.contact_sheet import write_sheet

            write_sheet(self.html, opened, names, found, repr(opened.recipe.scorer(scorer)))
        if self.json:
            show_json({"index": str(self.index), "scorer": repr(opened.recipe.scorer(scorer)), "where": self.where,
                       "queries": [{"query": name, "hits": [self._facts(hit) for hit in hits]}
                                   for name, hits in zip(names, found, strict=True)]})  # fmt: skip
            return 0
        for name, hits in zip(names, found, strict=True):
            show_hits(name, hits)
            if self.explain:
                show_alignments(hits)
        if self.html is not None:
            show_line(f"saved {self.html}")
        return 0

    def _facts(self, hit: Hit) -> dict[str, Any]:
        facts = asdict(hit)
        if not self.explain:
            del facts["alignment"]
        return facts


def usual(opened: Index) -> str:
    """The scorer that an index keeps vectors for."""
    scorers = {"windows": "sgi", "head": "max_sim_head", "patches": "max_sim"}
    return next((scorer for kind, scorer in scorers.items() if kind in opened.recipe.kinds), "global")


def candidates(text: str) -> Any:
    """The option as `Index.search` takes it. Raises ValueError for another word."""
    if text in ("auto", ALL):
        return "auto" if text == "auto" else None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--candidates must be a number from 1, all or auto, got {text!r}")
    return int(text)


def show_hits(query: str, hits: list[Hit]) -> None:
    """One row a hit."""
    rows = [
        (
            hit.id,
            number(hit.score),
            "" if hit.margin is None else number(hit.margin),
            "" if hit.stage_one_rank is None else str(hit.stage_one_rank + 1),
        )
        for hit in hits
    ]
    if rows:
        show_table(("picture", "score", "margin", "stage one"), rows, title=query)
    else:
        show_line(f"{query}: nothing was found")


def show_alignments(hits: list[Hit]) -> None:
    """What found what, hit by hit."""
    for hit in hits:
        rows = [
            (match.text, number(match.score), f"{match.weight:.3f}", " ".join(map(str, match.box)))
            for match in hit.alignment or ()
        ]
        show_table(("words", "score", "weight", "box x0 y0 x1 y1"), rows, title=hit.id)
