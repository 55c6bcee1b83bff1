"""A subject that scores without looking, for tests of the runner and of score files."""

from __future__ import annotations

from engine.benchmarks import baselines
from engine.benchmarks.subject import Subject


class Recorder:
    """Scores like the random baseline, keeps what it was asked, and can stop after so many calls."""

    def __init__(self, stop_after: int | None = None, bad: float | None = None) -> None:
        self.asked: list[tuple[list, list, bool]] = []
        self.stop_after, self.bad = stop_after, bad

    def __call__(self, images, texts, *, pairs):
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise RuntimeError("stopped")
        self.asked.append((list(images), list(texts), pairs))
        scores = baselines.random().score(images, texts, pairs=pairs)
        if self.bad is not None:
            scores[5 if pairs else (1, 1)] = self.bad
        return scores

    def subject(self, name: str = "recorder") -> Subject:
        return Subject(name, "v1", self, reads_images=False)
