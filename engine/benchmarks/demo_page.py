"""The page of the demonstration: one HTML file, plain enough for any browser, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from engine.benchmarks.demo_examples import FOUND, GLOBAL, MISSED, SGI_NATIVE, VERDICTS, Example
from engine.benchmarks.scenes import ScenesReport, percent

if TYPE_CHECKING:
    from engine.benchmarks.demo import DemoResult

GROUP_CHANCE, CHOICE_CHANCE = 1 / 6, 1 / 4
COMPARED = (GLOBAL, SGI_NATIVE)
_LETTERS = "ABCD"
_EXCHANGED = {
    "color": "the colors",
    "size": "the sizes",
    "material": "the materials",
    "quantity": "the numbers",
    "position": "the places",
}
_SPLITS = {
    "held_out": "in combinations of shape, color and material that the embedded model was never trained on",
    "in_domain": "in combinations that the embedded model was trained on",
    "shifted": "in combinations that the embedded model was never trained on, among further objects and drawn "
    "with other settings",
}
_SCORERS = (
    ("global", "one vector for the picture, one for the caption, and their cosine."),
    ("max_sim", "every word finds its best patch of the picture; the mean of what they found."),
    (
        "sgi rescaled",
        "the caption is split into its object phrases; each finds its best crop of the picture; the mean of what "
        "they found. Every crop is enlarged to fill the encoder's input, so a small thing looks large.",
    ),
    ("sgi native", "the same, but crops keep their scale on a plain canvas, so that size words keep their meaning."),
)
_STYLE = """
:root { --ink: #1d2430; --soft: #5b6575; --line: #d9dee6; --best: #dff1e4; --wrong: #a8321f; --right: #1c6b3a; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 2rem 1.25rem 4rem; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: 1.25rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p, li, dd { max-width: 46rem; }
table { border-collapse: collapse; margin: .75rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid var(--ink); font-weight: 600; }
td.best { background: var(--best); font-weight: 700; }
tr.chance td, .note, figcaption { color: var(--soft); }
.note, figcaption { font-size: .9rem; }
.text { text-align: left !important; }
.right { color: var(--right); font-weight: 600; } .wrong { color: var(--wrong); font-weight: 600; }
.row { display: flex; flex-wrap: wrap; gap: 1.25rem; align-items: flex-start; }
figure { margin: 0; } figure img { display: block; max-width: 100%; border: 1px solid var(--line); }
figure.plain { width: 192px; } figure.plain img { width: 192px; image-rendering: pixelated; }
figure.drawn { width: 482px; max-width: 100%; }
.wide { overflow-x: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1.25rem; }
pre { background: #f4f6f9; padding: 1rem; overflow-x: auto; font-size: .88rem; line-height: 1.45; }
"""


def page(result: DemoResult) -> str:
    """The whole page; pictures are referred to by their names below its folder."""
    categories = [*result.report.benchmark.categories, "negation"]
    sections = "\n".join(_section(category, result) for category in categories)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>peaksim: which words found which regions</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Which words found which regions</h1>
{_introduction(result)}
{_table(result.report)}
{_reading(result)}
<h2>The examples</h2>
<p>For each category, of the items that sgi gets right and global does not, the one that sgi decides <em>most
clearly</em>, and of those that sgi gets wrong the one it gets most clearly wrong: chosen by this rule, not by eye.
The table above says how often each happens.</p>
<p>How to read an example: the small pictures are the item, beside them its captions and what each scorer gives them.
Below, the same picture is drawn larger for its own caption and for the wrong one. Each frame is the region in which
a phrase of that caption scored highest, in the color of its line below the picture; the line holds the phrase and
that score. A phrase that is true of the picture should frame its object and score high; a phrase that is not has to
take the best there is. Sizes, places and colors are those of the rendered scene: frames may reach beyond an object,
for crops come from a fixed grid. What is drawn and compared here is sgi at native scale.</p>
{sections}
<h2>With your own pictures</h2>
<pre>{escape(result.next_steps)}</pre>
<p class="note">Model {escape(result.report.model)} ({escape(result.report.fingerprint)}), captions split by
{escape(result.report.segmenter)}, seed {result.report.benchmark.seed}, {result.seconds:.0f} seconds. All numbers are
in results.json.</p>
</body>
</html>
"""


def _introduction(result: DemoResult) -> str:
    benchmark = result.report.benchmark
    scorers = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in _SCORERS)
    return f"""<p>A picture of a red circle and a green star, and one of a green circle and a red star: the same
objects, the same words. Does a score know who has which color? Each item of this benchmark is two such pictures
and two captions that differ only in who has what. It counts as right only if each picture prefers its own caption
<em>and</em> each caption its own picture: the <em>group score</em>. Guessing gives {100 * GROUP_CHANCE:.1f} %.</p>
<p>One frozen model ({escape(result.report.model)}), {benchmark.items} rendered items a category,
{_SPLITS[benchmark.split]}. Nothing differs between the rows but the way of scoring:</p>
<dl>{scorers}</dl>"""


def _table(report: ScenesReport) -> str:
    categories = report.benchmark.categories
    scorers = list(dict.fromkeys(result.scorer for result in report.results))
    best = {category: max(report.result(scorer, category).group.value for scorer in scorers) for category in categories}
    heads = "".join(f"<th>{category.capitalize()}</th>" for category in categories)
    lines = []
    for scorer in scorers:
        cells = []
        for category in categories:
            interval = report.result(scorer, category).group
            # The best of a column is no news where guessing does as well.
            is_best = interval.value == best[category] > GROUP_CHANCE
            cells.append(_td(percent(interval), best=is_best))
        lines.append(f"<tr><td>{escape(scorer)}</td>{''.join(cells)}</tr>")
    chance = f"<td>{100 * GROUP_CHANCE:.1f}</td>" * len(categories)
    return f"""<div class="wide"><table>
<thead><tr><th>group score, %</th>{heads}</tr></thead>
<tbody>
{chr(10).join(lines)}
<tr class="chance"><td>chance</td>{chance}</tr>
</tbody></table></div>
<p class="note">± is half a 95 % bootstrap interval over items. The best of a column is shaded where it is above
chance. A tie is never right.</p>"""


def _reading(result: DemoResult) -> str:
    """What the table does and does not say."""
    choices = ", ".join(f"{escape(name)} {percent(value)} %" for name, value in result.negation.items())
    return f"""<p>A group score below chance is no accident: a cosine that only knows which words and which things
are there, not who has what, gives nearly the same score four times, and small preferences that are the same for
both pictures can never make all four comparisons right. Splitting the caption looks for each phrase on its own, and
the right phrase has a region of its own only in the right picture. What sgi cannot see is what no single region
shows: where things stand to each other (Position).</p>
<p>These are simple drawings and a small model, so that the effect is clear and can be repeated; the numbers say
nothing about photographs. Negation, four captions a picture, {result.negation_items} pictures: {choices}; guessing
gives {100 * CHOICE_CHANCE:.0f} %. sgi leaves denied phrases out by default, so two captions that differ only in a
denial tie, and ties are wrong.</p>"""


def _section(category: str, result: DemoResult) -> str:
    examples = [example for example in result.examples if example.category == category]
    number = result.negation_items if category == "negation" else result.report.benchmark.items
    parts = [f"<h3>{category.capitalize()}</h3>"]
    for verdict in VERDICTS:
        shown = [example for example in examples if example.verdict == verdict]
        parts += [_example(example) for example in shown]
        if not shown:
            parts.append(f'<p class="note">{escape(_none(verdict))} among the {number} items.</p>')
    return "\n".join(parts)


def _none(verdict: str) -> str:
    return "No item that global gets wrong and sgi right" if verdict == FOUND else "No item that sgi gets wrong"


def _example(example: Example) -> str:
    what = (
        "one caption is true"
        if example.category == "negation"
        else f"only {_EXCHANGED[example.category]} are exchanged"
    )
    style = "wrong" if example.verdict == MISSED else "right"
    plain = "".join(
        f'<figure class="plain"><img src="{escape(file)}" alt="picture {number + 1} of the item">'
        f"<figcaption>{_picture(example, number)}</figcaption></figure>"
        for number, file in enumerate(example.pictures)
    )
    drawn = "".join(
        f'<figure class="drawn"><img src="{escape(drawing.file)}" alt="regions found for the caption: '
        f'{escape(example.captions[drawing.caption])}"><figcaption>{_picture(example, drawing.picture)}, caption '
        f"{_LETTERS[drawing.caption]}: {_truth(example, drawing.picture, drawing.caption)}</figcaption></figure>"
        for drawing in example.drawings
    )
    return f"""<p><span class="{style}">{escape(example.verdict)}</span> (item {example.item}; {what})</p>
<div class="row">{plain}<div class="wide">{_scores(example)}</div></div>
<div class="row" style="margin-top: 1rem">{drawn}</div>"""


def _picture(example: Example, number: int) -> str:
    return f"picture {number + 1}" if len(example.pictures) > 1 else "the picture"


def _truth(example: Example, picture: int, caption: int) -> str:
    return "true" if example.right[picture] == caption else "false"


def _scores(example: Example) -> str:
    """Captions as rows, and a column for each picture under the two scorers that are compared."""
    columns = [(name, number) for name in COMPARED for number in range(len(example.pictures))]
    several = len(example.pictures) > 1
    heads = "".join(
        f"<th>{escape(name)}{f'<br>picture {number + 1}' if several else ''}</th>" for name, number in columns
    )
    lines = []
    for caption, words in enumerate(example.captions):
        own = [number + 1 for number, right in enumerate(example.right) if right == caption]
        note = f"true of picture {own[0]}" if several and own else "true" if own else "false"
        cells = "".join(_cell(example.scores[name][number], caption, example.right[number]) for name, number in columns)
        lines.append(
            f'<tr><td><strong>{_LETTERS[caption]}</strong></td><td class="text">{escape(words)}<br>'
            f'<span class="note">{note}</span></td>{cells}</tr>'
        )
    wins = "".join(
        f"<td>{_verdict(example.scores[name][number], example.right[number])}</td>" for name, number in columns
    )
    return f"""<table><thead><tr><th></th><th class="text">caption</th>{heads}</tr></thead>
<tbody>{"".join(lines)}
<tr><td></td><td class="text note">the picture prefers</td>{wins}</tr>{_text_side(example, several)}</tbody></table>"""


def _cell(row: Sequence[float], caption: int, right: int) -> str:
    return _td(f"{row[caption]:+.4f}", best=row[caption] == max(row) and caption == right)


def _td(text: str, *, best: bool) -> str:
    return f'<td class="best">{text}</td>' if best else f"<td>{text}</td>"


def _verdict(row: Sequence[float], right: int) -> str:
    top = [number for number, score in enumerate(row) if score == max(row)]
    names = " = ".join(_LETTERS[number] for number in top)
    return _mark(names, top == [right])


def _text_side(example: Example, several: bool) -> str:
    """Which picture each caption prefers, one column a scorer and caption."""
    if not several:
        return ""
    cells = []
    for name in COMPARED:
        scores = example.scores[name]
        for caption in range(len(example.captions)):
            column = [row[caption] for row in scores]
            top = [number for number, score in enumerate(column) if score == max(column)]
            own = [example.right.index(caption)]
            names = " = ".join(str(number + 1) for number in top)
            cells.append(f"<td>{_LETTERS[caption]}: {_mark(names, top == own)}</td>")
    return f'<tr><td></td><td class="text note">the caption prefers picture</td>{"".join(cells)}</tr>'


def _mark(names: str, right: bool) -> str:
    return f'<span class="{"right" if right else "wrong"}">{names} {"✓" if right else "✗"}</span>'
