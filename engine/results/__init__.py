"""Tables of `RESULTS.md`: what joins benchmarks, trainings and diagnostics.

A section is a module `engine/results/<name>.py` with

    def section(run: Run) -> str      # Markdown, its own heading first
    def train(run: Run) -> None       # optional: the trainings whose figures it shows, resumable

and a line in `engine.results.registry`. `engine.results.page` writes what sections return between their markers in
`RESULTS.md`. In a quick run a section measures a few items and raises `ResultsDiffer` where the committed figures
(`engine.results.figures`) are not met.
"""
