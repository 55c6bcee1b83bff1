"""The making of RESULTS.md: markers, committed figures, parts that are kept, and the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.benchmarks.scenes import ScenesBenchmark
from engine.cli import main
from engine.engine import load
from engine.metrics import Interval
from engine.results import registry, scorers
from engine.results.figures import Figure, ResultsDiffer, check_figures, read_figures, write_figures
from engine.results.page import END, replaced, start, write_sections
from engine.results.run import Run
from engine.scorers.registry import KINDS
from engine.scorers.sgi import SGI

ROOT = Path(__file__).resolve().parent.parent
PAGE = f"# Page\n\n{start('a')}\n\nold a\n\n{END}\n\nby hand\n\n{start('b')}\n\nold b\n\n{END}\n\nlast\n"


def test_sections_are_replaced_and_the_rest_is_left():
    page = replaced(PAGE, {"b": "## B\n\\1 new"})
    assert page == PAGE.replace("old b", "## B\n\\1 new")
    assert replaced(page, {"b": "old b"}) == PAGE


def test_a_section_without_markers_comes_to_the_end():
    page = replaced(PAGE, {"c": "new c"})
    assert page.startswith(PAGE.rstrip()) and page.endswith(f"{start('c')}\n\nnew c\n\n{END}\n")
    assert replaced(page, {"c": "new c"}) == page


@pytest.mark.parametrize(
    "page", [PAGE + start("a") + "\n" + END, PAGE.replace(f"old a\n\n{END}", "old a"), start("a") + "\nno end"]
)
def test_broken_markers_are_refused(page):
    with pytest.raises(ValueError, match="must hold <!-- results: a --> once, and <!-- end --> before the next"):
        replaced(page, {"a": "new"})


def test_a_page_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.md"):
        write_sections(tmp_path / "no.md", {"a": "new"})


def figure(name: str, value: float, low: float, high: float) -> Figure:
    return Figure.of(name, 100, Interval(value, low, high))


def test_figures_are_read_as_they_were_written(tmp_path):
    figures = [figure("x color", 0.5, 0.4, 0.6), figure("y", 1.0, 0.96, 1.0)]
    write_figures(tmp_path / "deep" / "f.jsonl", figures)
    assert read_figures(tmp_path / "deep" / "f.jsonl") == figures
    with pytest.raises(FileNotFoundError, match=r"g\.jsonl is missing; `make results` writes it"):
        read_figures(tmp_path / "g.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"name": "x"', r"f\.jsonl, line 1: is damaged \("),
        (b"\xff\n", r"f\.jsonl, line 1: is damaged \("),
        (b"[1]\n", r"f\.jsonl, line 1: must be an object, got b'\[1\]'"),
        (b"{}\n", r"f\.jsonl holds other lines than figures"),
        (b"", r"f\.jsonl is empty; `make results` writes it"),
    ],
)
def test_damaged_figures_are_named(tmp_path, text, message):
    (tmp_path / "f.jsonl").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_figures(tmp_path / "f.jsonl")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"made_by": "a", "values": 3}', "null"])
def test_a_damaged_part_is_made_again(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    assert Run(tmp_path).part("p", "a", lambda: {"x": 1}) == {"x": 1}
    assert Run(tmp_path).part("p", "a", dict) == {"x": 1}


def test_a_training_that_differs_leaves_the_other_sections_their_turn(tmp_path, monkeypatch, capsys):
    def differs(run: Run) -> None:
        raise ResultsDiffer("a differs")

    monkeypatch.setattr(registry, "SECTIONS", {"a": lambda run: "made a", "b": lambda run: "made b"})
    monkeypatch.setattr(registry, "TRAININGS", {"a": differs})
    (tmp_path / "RESULTS.md").write_text(PAGE)
    assert main(["results", "--train", "--root", str(tmp_path), "--work", str(tmp_path / "work")]) == 1
    page = (tmp_path / "RESULTS.md").read_text()
    assert "made a" in page and "made b" in page
    assert "a: a differs" in capsys.readouterr().out


def test_figures_meet_where_their_intervals_do(tmp_path):
    path = tmp_path / "f.jsonl"
    write_figures(path, [figure("x", 0.5, 0.4, 0.6), figure("y", 0.1, 0.05, 0.2)])
    check_figures(path, [figure("x", 0.7, 0.6, 0.8), figure("y", 0.02, 0.0, 0.05)])
    with pytest.raises(ResultsDiffer, match=r"f\.jsonl: 1 of 2 figures .* x: found 70\.0 % \[61\.0, 80\.0\] over 100"):
        check_figures(path, [figure("x", 0.7, 0.61, 0.8), figure("y", 0.1, 0.05, 0.2)])
    with pytest.raises(ResultsDiffer, match=r"z: found .*, committed nothing"):
        check_figures(path, [figure("z", 0.7, 0.61, 0.8)])
    with pytest.raises(ValueError, match="at least one figure"):
        check_figures(path, [])


def test_parts_are_kept_for_those_who_made_them(tmp_path):
    made = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"n": len(made)}

    run = Run(tmp_path)
    assert [run.part("a", "me", make), run.part("a", "me", make)] == [{"n": 1}, {"n": 1}]
    assert run.part("a", "another", make) == {"n": 2}
    quick = Run(tmp_path, quick=True)
    assert quick.part("a", "another", make) == {"n": 3} and run.part("a", "another", make) == {"n": 2}
    assert (run.items(400, 20), quick.items(400, 20)) == (400, 20)
    assert Run(root=tmp_path).figures == tmp_path / "docs" / "results"


@pytest.mark.parametrize("kind", KINDS)
def test_a_scorer_is_told_by_its_words(kind):
    assert repr(kind()) == repr(kind()) and " at 0x" not in repr(kind())


def test_parts_are_of_scorers_with_their_options(monkeypatch, tmp_path):
    class Asked(Exception):
        """Holds what would have made the part."""

    def part(run: Run, name: str, made_by: str, make: object) -> None:
        raise Asked(made_by)

    monkeypatch.setattr(Run, "part", part)
    peaksim, told = load("scenes", device="cpu"), []
    for scorer in (SGI(), SGI(grid="none"), SGI()):
        monkeypatch.setattr(scorers, "scorers", lambda scorer=scorer: {"sgi": scorer})
        with pytest.raises(Asked) as found:
            scorers._part(Run(tmp_path), peaksim, ScenesBenchmark(categories=("color",)), heads=False)
        told.append(str(found.value))
    assert told[0] == told[2] != told[1]


@pytest.fixture
def sections(monkeypatch, tmp_path) -> Path:
    """Two sections over figures of their own, in a repository that holds a page."""

    def section(name: str):
        def make(run: Run) -> str:
            path = run.figures / f"{name}.jsonl"
            found = [figure("x", 0.5, 0.4, 0.6)]
            run.progress(name, 0, 1)
            if run.quick:
                check_figures(path, found)
            else:
                write_figures(path, found)
            return f"## {name}"

        return make

    monkeypatch.setattr(registry, "SECTIONS", {name: section(name) for name in ("a", "b")})
    monkeypatch.setattr(registry, "TRAININGS", {"b": lambda run: (run.root / "trained").write_text("b")})
    (tmp_path / "RESULTS.md").write_text(PAGE)
    return tmp_path


def test_the_command_writes_sections_and_a_quick_run_checks_them(sections, capsys):
    words = ["results", "--root", str(sections), "--work", str(sections / "work")]
    assert main([*words, "--section", "b"]) == 0
    assert "b: written" in capsys.readouterr().out
    page = (sections / "RESULTS.md").read_text()
    assert page == PAGE.replace("old b", "## b")
    assert main([*words, "--quick", "--section", "b", "--json"]) == 0
    assert '"b": "met"' in capsys.readouterr().out
    write_figures(sections / "docs" / "results" / "b.jsonl", [figure("x", 0.1, 0.0, 0.2)])
    assert main([*words, "--quick", "--section", "b"]) == 1
    assert "b: b.jsonl: 1 of 1 figures are not reproduced" in capsys.readouterr().out
    assert (sections / "RESULTS.md").read_text() == page and not (sections / "trained").exists()


def test_the_command_trains_when_asked_to(sections):
    words = ["results", "--root", str(sections), "--work", str(sections / "work")]
    assert main([*words, "--train"]) == 0
    assert (sections / "trained").read_text() == "b"
    assert (sections / "RESULTS.md").read_text() == PAGE.replace("old a", "## a").replace("old b", "## b")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--section", "z"], "section must be one of a, b, got 'z'"),
        (["--train", "--section", "a"], "--train: one of the sections must have heads to train (b), got a"),
        (["--quick", "--train"], "--quick measures what is committed"),
        (["--root", "nowhere"], "nowhere/RESULTS.md is missing"),
    ],
)
def test_what_cannot_be_made_is_said(sections, capsys, more, message):
    assert main(["results", "--root", str(sections), *more]) != 0
    assert message in capsys.readouterr().err


def test_every_section_has_its_place_and_its_figures():
    page = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    marked = re.findall(r"<!-- results: (\S+) -->", page)
    assert marked == list(registry.SECTIONS)
    assert all(page.count(start(name)) == 1 for name in registry.SECTIONS)
    assert set(registry.TRAININGS) <= set(registry.SECTIONS)
