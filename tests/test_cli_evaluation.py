"""``peaksim eval`` and ``peaksim compare``: official files below one folder, baselines, shards, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image

from engine.benchmarks.baselines import BASELINES
from engine.benchmarks.official import OFFICIAL, read_official
from engine.benchmarks.subject import label
from engine.cli.evaluation import Baseline, Benchmark
from engine.cli.options import scorer_named
from engine.engine import Engine
from engine.scenes.items import CATEGORIES
from engine.scenes.settings import ITEMS_FORMAT
from engine.scorers.max_sim import MaxSim
from engine.scorers.sgi import SGI
from tests.command_line import Shell, fake_shell, write_data
from tests.fake_encoder import FakeEncoder

MODEL = ("--model", "fake", "--segmenter", "rules")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return fake_shell(monkeypatch, capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def test_names_of_the_command_line_are_those_of_the_library():
    assert get_args(Benchmark) == ("scenes", *OFFICIAL)
    assert get_args(Baseline) == tuple(BASELINES)


def test_eval_runs_an_official_benchmark(shell: Shell, data: Path, tmp_path: Path):
    saved = [tmp_path / "global.json", tmp_path / "max_sim.json"]
    folder = ("--annotations", data / "winoground", "--images", data / "winoground" / "images")
    assert shell("eval", "winoground", *folder, *MODEL, "--out", saved[0]) == 0
    assert "**group (all): 100.0 [" in shell.out and "blind, whatever it prefers 0.0" in shell.out
    assert "- ties in 0.00 %" in shell.out and "deciding differences: mean " in shell.out
    assert shell.err.startswith("peaksim: winoground: 2 items, not an official count of Winoground (400); 2 to score")
    assert "; 0 images missing" in shell.err
    found = shell.json(
        *("eval", "winoground", "--data", data, *MODEL, "--scorer", "max_sim", "--out", saved[1]),
        *("--resume", tmp_path / "scores.jsonl"),
    )
    assert found["benchmark"] == "winoground" and (tmp_path / "scores.jsonl").exists()
    assert json.loads(saved[1].read_text(encoding="utf-8")) == found
    assert shell("compare", *saved, "--out", tmp_path / "chart.png") == 0
    assert "max_sim" in shell.out and "global" in shell.out
    with Image.open(tmp_path / "chart.png") as chart:
        assert chart.format == "PNG"
    assert shell("compare", *saved, "--json") == 0
    assert len(json.loads(shell.out)) == 2


@pytest.mark.parametrize(
    ("baseline", "value"),
    [("oracle", 1.0), ("constant", 0.0), ("blind_shortest", 1.0), ("blind_longest", 0.0), ("blind_no_negation", 0.0)],
)
def test_baselines_need_annotations_alone(shell: Shell, data: Path, baseline: str, value: float):
    texts = ("--annotations", data / "sugarcrepe")
    found = shell.json("eval", "sugarcrepe", *texts, "--baseline", baseline)
    assert found["lines"][0]["values"]["accuracy"]["value"] == value and found["lines"][0]["count"] == 21
    assert found["baselines"]["chance"] == 0.5 and found["baselines"]["blind: shortest text"] == 1.0


def test_the_random_baseline_knows_nothing(shell: Shell, data: Path):
    found = shell.json("eval", "sugarcrepe", "--data", data, "--baseline", "random")
    assert found["tie_rate"] == 0.0 and found["fingerprint"] == "random 0"
    # Three distinct pairs, each asked in seven subsets.
    assert found["lines"][0]["values"]["accuracy"]["value"] in (0.0, 1 / 3, 2 / 3, 1.0)


def test_shards_are_merged_and_a_limit_is_spread(shell: Shell, data: Path, tmp_path: Path):
    call = ("eval", "sugarcrepe", "--data", data, *MODEL)
    whole = shell.json(*call)
    parts = [tmp_path / f"{k}.jsonl" for k in range(2)]
    for k, part in enumerate(parts):
        found = shell.json(*call, "--shard", f"{k}/2", "--resume", part)
        assert f"shard {k} of 2" in found["edition"] and found["lines"][0]["count"] == 11 - k
    merges = [word for part in parts for word in ("--merge", part)]
    for _ in range(2):
        assert shell.json(*call, "--resume", tmp_path / "all.jsonl", *merges) == whole
    # Parts of another evaluation are refused before the file is begun.
    other = ("eval", "sugarcrepe", "--data", data, "--baseline", "random")
    assert shell(*other, "--resume", tmp_path / "other.jsonl", *merges) == 2
    assert "belongs to another evaluation" in shell.err and not (tmp_path / "other.jsonl").exists()
    few = shell.json(*call, "--limit", "7")
    assert few["lines"][0]["count"] == 7 and "limit 7 spread evenly" in few["edition"]


def test_a_missing_picture_is_an_error_or_left_out_and_said(shell: Shell, data: Path):
    (data / "coco" / "val2017" / "2.jpg").unlink()
    call = ("eval", "sugarcrepe", "--data", data, *MODEL)
    assert shell(*call) == 1
    assert "1 of 3 images are not in" in shell.err and "2.jpg" in shell.err
    assert shell(*call, "--on-missing", "skip") == 0
    assert "14 to score; 1 image missing" in shell.err and "1 images were missing: this is no official" in shell.out
    # The annotations alone have nothing missing.
    assert shell("eval", "sugarcrepe", "--data", data, "--baseline", "oracle") == 0


def test_winogrounds_tags_become_slices(shell: Shell, data: Path, tmp_path: Path):
    tags = tmp_path / "tags.json"
    tags.write_text(json.dumps({"0": ["Visually Difficult"], "1": []}), encoding="utf-8")
    found = shell.json("eval", "winoground", "--data", data, "--tags", tags, "--baseline", "oracle")
    assert {"#Visually Difficult", "#NoTag"} <= {line["name"] for line in found["lines"]}


def test_eval_renders_the_negation_set(shell: Shell):
    found = shell.json("eval", "scenes_negation", "--limit", "3", "--scorer", "global", *MODEL)
    assert found["benchmark"]["items"] == 3
    assert [result["scorer"] for result in found["results"]] == ["global"]
    options = ("--limit", "6", "--scorer", "global", *MODEL, "--wording", "held_out", "--seed", "5")
    assert shell("eval", "scenes_negation", *options) == 0
    assert "6 choices in held_out wordings, retrieval among 300 scenes, split held_out, seed 5" in shell.out


def test_eval_renders_the_scenes(shell: Shell, tmp_path: Path):
    call = ("eval", "scenes", "--limit", "2", "--scorer", "global", *MODEL)
    found = shell.json(*call, "--segments", "oracle", "--out", tmp_path / "scenes.json")
    assert found["benchmark"]["items"] == 2 and found["benchmark"]["segments"] == "oracle"
    assert json.loads((tmp_path / "scenes.json").read_text(encoding="utf-8")) == found
    assert shell(*call) == 0
    assert "| global |" in shell.out and "split held_out" in shell.out
    # The cosine looks at no segments: nothing is said of them.
    assert found["segmenter"] == "" and "segments" not in shell.out
    assert shell(*call, "--scorer", "sgi", "--option", "crops=native") == 0
    assert "| sgi crops=native |" in shell.out and "segments parsed (rules)" in shell.out


def test_compare_reads_whatever_eval_and_compare_wrote(shell: Shell, data: Path, tmp_path: Path):
    files = [tmp_path / f"{name}.json" for name in ("global", "native", "negation", "official", "table")]
    scenes = ("eval", "scenes", "--limit", "2", *MODEL)
    assert shell(*scenes, "--scorer", "global", "--out", files[0]) == 0
    assert shell(*scenes, "--scorer", "sgi", "--option", "crops=native", "--out", files[1]) == 0
    assert shell("eval", "scenes_negation", "--limit", "2", "--scorer", "global", *MODEL, "--out", files[2]) == 0
    assert shell("eval", "winoground", "--data", data, *MODEL, "--out", files[3]) == 0
    assert shell("compare", *files[:4], "--out", files[4], "--json") == 0, shell.err
    found = json.loads(shell.out)
    assert {(one["subject"], one["benchmark"]) for one in found} == {
        *(("fake · global", f"scenes_{category}") for category in CATEGORIES),
        *(("fake · sgi crops=native", f"scenes_{category}") for category in CATEGORIES),
        *(("fake · global", name) for name in ("scenes_negation", "scenes_retrieval", "scenes_retrieval_negated")),
        ("fake · global", "winoground"),
    }
    assert "SGI(" in found[5]["fingerprint"] and found[5]["fingerprint"].endswith(" · rules")
    assert shell("compare", files[4], "--json") == 0 and json.loads(shell.out) == found
    # What is run stands beside what was saved, and is the same.
    run = ("compare", "--models", "fake", "--scorers", "sgi?crops=native", "--segmenter", "rules", "--limit", "2")
    assert shell(*run, "--results", tmp_path / "kept", "--json") == 0, shell.err
    assert json.loads(shell.out) == found[5:10]
    assert shell(*run, files[0], "--results", tmp_path / "kept") == 0 and "| fake · global |" in shell.out


def test_scenes_of_other_items_are_not_set_side_by_side(shell: Shell, tmp_path: Path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    call = ("eval", "scenes", "--limit", "2", "--scorer", "max_sim", *MODEL)
    shell("eval", "scenes", "--limit", "2", "--scorer", "global", *MODEL, "--out", files[0])
    for other in (("--limit", "3"), ("--split", "shifted")):
        assert shell(*call, *other, "--out", files[1]) == 0
        assert shell("compare", *files) == 2 and "must be one edition throughout" in shell.err
    assert shell(*call, "--out", files[1]) == 0 and shell("compare", *files) == 0
    values = json.loads(files[1].read_text(encoding="utf-8"))
    for change in ({"items_format": ITEMS_FORMAT + 1}, {"benchmark": {**values["benchmark"], "seed": 1}}):
        files[1].write_text(json.dumps(values | change), encoding="utf-8")
        assert shell("compare", *files) == 2 and "must be one edition throughout" in shell.err


def test_kept_scenes_of_another_format_are_made_anew(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    call = ("compare", "--models", "fake", "--limit", "1", "--results", tmp_path / "kept")
    assert shell(*call) == 0 and shell(*call) == 0
    assert len(list((tmp_path / "kept" / "scenes").iterdir())) == 1
    monkeypatch.setattr("engine.benchmarks.comparison.ITEMS_FORMAT", ITEMS_FORMAT + 1)
    assert shell(*call) == 0
    assert len(list((tmp_path / "kept" / "scenes").iterdir())) == 2


def test_given_segments_are_part_of_the_name(shell: Shell, tmp_path: Path):
    call = ("eval", "scenes", "--limit", "1", "--scorer", "sgi", "--segments", "oracle", *MODEL)
    found = shell.json(*call, "--out", tmp_path / "oracle.json")
    assert found["segmenter"] == "oracle" and found["subjects"]["sgi"][0] == "fake · sgi segments=oracle"
    assert shell("compare", tmp_path / "oracle.json") == 0 and "| fake · sgi segments=oracle |" in shell.out


def test_compare_runs_what_is_not_there_yet(shell: Shell, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[FakeEncoder] = []

    def load(name: str, *, device: str, dtype: str) -> FakeEncoder:
        made.append(FakeEncoder(name=name, context_length=40))
        return made[-1]

    monkeypatch.setattr("engine.engine.load_encoder", load)
    table, whole, chart = (tmp_path / "out" / f"table{suffix}" for suffix in (".md", ".json", ".png"))
    scorers = ("--scorers", "global", "sgi?crops=native")
    call = (
        *("compare", "--models", "one", "two", *scorers, "--baselines", "random", "oracle"),
        *("--benchmarks", "winoground", "scenes", "sugarcrepe", "--data", data, "--limit", "2"),
        *("--segmenter", "rules", "--results", tmp_path / "kept"),
        *("--out", table, "--out", whole, "--out", chart),
    )
    assert shell(*call) == 0, shell.err
    lines = table.read_text(encoding="utf-8").splitlines()
    assert shell.out.splitlines()[0] == lines[0]
    heads = [cell.strip().split()[0] for cell in lines[0].split("|")[2:-1]]
    assert heads == ["winoground", *(f"scenes_{category}" for category in CATEGORIES), "sugarcrepe"]
    names = [line.split("|")[1].strip() for line in lines[2:9]]
    assert names == [
        *("one · global", "one · sgi crops=native", "two · global", "two · sgi crops=native"),
        *("random", "oracle", "*best text-only scorer or chance*"),
    ]
    assert lines[6].split("|")[3].strip() == "–", "baselines do not look at rendered scenes"
    results = json.loads(whole.read_text(encoding="utf-8"))
    assert len(results) == 2 * 2 + 4 * (2 + len(heads) - 2)
    with Image.open(chart) as drawn:
        assert drawn.format == "PNG"
    # The second time nothing is encoded, and a further scorer is all that is run.
    made.clear()
    first = shell.out
    assert shell(*call) == 0 and shell.out == first
    assert [encoder.calls for encoder in made] == [[], []]
    more = [*call]
    more[more.index("sgi?crops=native") : more.index("sgi?crops=native") + 1] = ["sgi?crops=native", "max_sim"]
    assert shell(*more) == 0 and "two · max_sim" in shell.out and made[-1].calls


def test_compare_names_scorers_by_what_is_not_their_default():
    assert scorer_named("sgi?crops=native&exclusive=true") == SGI(crops="native", exclusive=True)
    assert scorer_named("max_sim") == MaxSim() and label(MaxSim()) == "max_sim"
    assert label(SGI(crops="native", fill=(1, 2, 3))) == "sgi crops=native fill=(1, 2, 3)"
    with pytest.raises(ValueError, match=r"an option of 'sgi' .* got 'size=3'"):
        scorer_named("sgi?size=3")


def test_another_model_of_the_same_name_is_scored_anew(shell: Shell, data: Path, tmp_path: Path, monkeypatch):
    call = ("compare", "--models", "fake", "--benchmarks", "winoground", "--data", data, "--results", tmp_path / "kept")
    assert shell(*call) == 0
    encoder = FakeEncoder(context_length=40)
    object.__setattr__(encoder.spec, "fingerprint", "changed")
    monkeypatch.setattr("engine.engine.load_encoder", lambda name, *, device, dtype: encoder)
    assert shell(*call) == 0 and sum(encoder.calls) == 4
    assert len(list((tmp_path / "kept" / "winoground").glob("*.jsonl"))) == 2


def test_a_chart_is_refused_before_anything_is_run_when_it_cannot_be_drawn(shell: Shell, data: Path, monkeypatch):
    def fail(*_: object) -> None:
        raise ImportError("bar_chart: needs matplotlib, which is missing; pip install 'peaksim[plots]'")

    monkeypatch.setattr("engine.benchmarks.report.check_charts", fail)
    monkeypatch.setattr(Engine, "score", fail)
    call = ("compare", "--models", "fake", "--benchmarks", "winoground", "--data", data, "--out", "x.png")
    assert shell(*call) == 1 and "pip install 'peaksim[plots]'" in shell.err


def test_official_places_are_refused_by_name(data: Path):
    with pytest.raises(ValueError, match=r"benchmark: must be one of sugarcrepe, .*, got 'coco'"):
        read_official("coco", data)
    with pytest.raises(FileNotFoundError, match=r"bivlc: its annotations must be at .*bivlc\.csv, there is nothing"):
        read_official("bivlc", data)
    with pytest.raises(ValueError, match="sugarcrepe: tags are Winoground's, got x"):
        read_official("sugarcrepe", data, tags="x")
    with pytest.raises(ValueError, match="negbench_mcq: its annotations must be a file, got the folder "):
        read_official("negbench_mcq", data, annotations=data / "negbench")
    with pytest.raises(ValueError, match="winoground: its annotations must be a folder, got the file "):
        read_official("winoground", data, annotations=data / "winoground" / "examples.jsonl")
    with pytest.raises(ValueError, match="winoground: its tags must be a file, got the folder "):
        read_official("winoground", data, tags=data)
    assert len(read_official("negbench_mcq", data)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "winoground"], "winoground: needs its annotations and images, or a data folder"),
        (["eval", "winoground", "--baseline", "oracle"], "winoground: needs its annotations, or a data folder"),
        (["eval", "winoground", "--split", "shifted"], "eval winoground --scorer standard: has no use for --split"),
        (["eval", "winoground", "--shard", "1"], "--shard must be K/N with 0 <= K < N, got '1'"),
        (
            ["eval", "winoground", "--data", "{data}", "--baseline", "oracle", "--shard", "2/2"],
            "wanted (k, n) with 0 <= k < n, got (2, 2)",
        ),
        (["eval", "winoground", "--merge", "a"], "--merge joins score files into that of --resume"),
        (
            ["eval", "winoground", "--baseline", "oracle", "--model", "fake"],
            "eval winoground --baseline oracle: has no use for --model",
        ),
        (["eval", "scenes", "--images", "x"], "eval scenes --scorer standard: has no use for --images"),
        (["eval", "scenes", "--baseline", "oracle"], "eval scenes --baseline oracle: has no use for --baseline"),
        (["eval", "scenes_negation", "--segments", "oracle"], "has no use for --segments"),
        (["eval", "scenes", "--wording", "held_out"], "eval scenes --scorer standard: has no use for --wording"),
        (["eval", "winoground", "--seed", "3"], "eval winoground --scorer standard: has no use for --seed"),
        (["eval", "scenes", "--option", "a=b"], "eval scenes --scorer standard: has no use for --option"),
        (["compare"], "compare: give --models, --baselines, or files that `peaksim eval --out` wrote"),
        (
            ["compare", "{data}/sugarcrepe/add_att.json"],
            "must be a result that `peaksim eval --out` or `compare --out` wrote",
        ),
        (["compare", "--models", "a", "a"], "compare: --models must differ, got a a"),
        (["compare", "--baselines", "oracle"], "--baselines need an official benchmark, got scenes alone"),
        (["compare", "--models", "a", "--scorers"], "needs at least one of --benchmarks and of --scorers"),
        (["compare", "--models", "a", "--out", "x.pdf"], "--out must end in .md, .json, .png, got x.pdf"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(shell: Shell, data: Path, arguments: list[str], message: str):
    assert shell(*(argument.format_map({"data": data}) for argument in arguments)) == 2
    last = shell.err.splitlines()[-1]
    assert shell.out == "" and last.startswith("peaksim: ") and message in last
