"""Ways to affirm and to deny things in a sentence, in three sets: for training, of the benchmark, and for tests alone.

The benchmark's are NegBench's templates (Alhamoud et al. 2025, arXiv 2501.09425). A set of its own lets a training
leave them out. All words are of the embedded model's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.scenes.captions import with_article

WordingSet = Literal["training", "benchmark", "held_out"]
QUESTION_KINDS = ("positive", "negative", "hybrid")


@dataclass(frozen=True)
class Wording:
    """Sentences in which `{x}` and `{y}` are affirmed and `{n}` is denied.

    `bare`: what is denied has no article ("no red circle").
    """

    one: str
    two: str
    negative: str
    hybrid: str
    bare: bool = False

    def affirm(self, x: str, y: str | None = None) -> str:
        """`x` is there, and so is `y` if it is given."""
        if y is None:
            return _sentence(self.one.format(x=with_article(x)))
        return _sentence(self.two.format(x=with_article(x), y=with_article(y)))

    def deny(self, n: str) -> str:
        """`n` is not there."""
        return _sentence(self.negative.format(n=self._denied(n)))

    def affirm_and_deny(self, x: str, n: str) -> str:
        """`x` is there, and `n` is not."""
        return _sentence(self.hybrid.format(x=with_article(x), n=self._denied(n)))

    def question(self, kind: str, present: tuple[str, str], absent: str) -> list[str]:
        """NegBench's four answers, the right one first; `kind` of `QUESTION_KINDS` is that of the right one."""
        a, b = present
        right = {
            "positive": self.affirm(a, b),
            "negative": self.deny(absent),
            "hybrid": self.affirm_and_deny(b, absent),
        }[kind]
        return [right, self.affirm_and_deny(absent, b), self.affirm(absent), self.deny(a)]

    def _denied(self, n: str) -> str:
        return n if self.bare else with_article(n)


_TRAINING = (
    Wording("there is {x}", "there is {x} and {y}", "there is no {n}", "there is {x} but no {n}", bare=True),
    Wording("a picture of {x}", "a picture of {x} and {y}", "a picture without {n}", "a picture of {x} without {n}"),
    Wording(
        "this image shows {x}",
        "this image shows {x} and {y}",
        "this image does not show {n}",
        "this image shows {x} and does not show {n}",
    ),
    Wording(
        "an image with {x}",
        "an image with {x} and {y}",
        "an image with no {n}",
        "an image with {x} and no {n}",
        bare=True,
    ),
    Wording(
        "the scene contains {x}",
        "the scene contains {x} and {y}",
        "the scene does not contain {n}",
        "the scene contains {x}, not {n}",
    ),
    Wording("we see {x}", "we see {x} and {y}", "no {n} is present", "we see {x}, no {n} is present", bare=True),
)
_BENCHMARK = (
    Wording(
        "this image features {x}",
        "this image features {x} and {y}",
        "this image does not feature {n}",
        "this image features {x}, but not {n}",
    ),
)
_HELD_OUT = (
    Wording("{x}", "{x} and {y}", "{n} is absent", "{x} is present, {n} is absent"),
    Wording(
        "the picture depicts {x}",
        "the picture depicts both {x} and {y}",
        "{n} is not included in the picture",
        "the picture depicts {x}, without {n}",
    ),
    Wording("{x} is visible", "{x} and {y} are visible", "no {n} is visible", "{x} is visible, no {n} is", bare=True),
)
WORDINGS = {"training": _TRAINING, "benchmark": _BENCHMARK, "held_out": _HELD_OUT}

# What is said before or after a whole caption {c}; the benchmark's stands in `engine.scenes.negation`.
DENIALS = {
    "training": (
        "{c} and no {n}",
        "{c} but no {n}",
        "{c}, without any {n}",
        "No {n} is present. {C}",
        "There is no {n}. {C}",
        "{c}, but there is no {n}",
    ),
    "benchmark": ("There is no {n} in the image. {C}",),
    "held_out": ("{c}, {n} excluded", "{c} and not any {n}", "The {n} is absent. {C}"),
}


def with_denial(caption: str, denied: str, template: str) -> str:
    """`caption` with the denial of one thing, after one of `DENIALS`.

    >>> with_denial("a red circle", "blue ring", DENIALS["benchmark"][0])
    'There is no blue ring in the image. A red circle'
    """
    return template.format(c=caption, C=caption[0].upper() + caption[1:], n=denied)


def wordings_of(sets: tuple[str, ...]) -> tuple[Wording, ...]:
    """The wordings of these sets. Raises ValueError for none, or an unknown set."""
    check_sets(sets)
    return tuple(wording for name in sets for wording in WORDINGS[name])


def check_sets(sets: tuple[str, ...]) -> None:
    """Raise ValueError for no set of wordings, or an unknown one."""
    if not sets or any(name not in WORDINGS for name in sets):
        raise ValueError(f"wordings: sets must be one or more of {', '.join(WORDINGS)}, got {sets}")


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."
