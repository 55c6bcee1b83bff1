"""Score files: resuming, shards, and what is refused and left as it is."""

from __future__ import annotations

import json

import pytest

from engine.benchmarks.evaluate import evaluate
from engine.benchmarks.score_file import ScoreFile, merge_score_files, terms_of
from engine.benchmarks.subject import Subject
from engine.datasets.base import CHOICE, Dataset, ImageRef, Item, RetrievalDataset, Rule
from tests import benchmark_items as make
from tests.recorder import Recorder


def test_a_run_that_stopped_goes_on_where_it_was(tmp_path):
    data, path = make.sugarcrepe_items(60), tmp_path / "scores.jsonl"
    with pytest.raises(RuntimeError, match="stopped"):
        evaluate(data, Recorder(stop_after=2).subject(), resume_path=path, chunk_items=10)
    recorder, seen = Recorder(), []
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    resumed = evaluate(data, recorder.subject(), resume_path=path, chunk_items=10, progress=progress)
    assert len(recorder.asked) == 4 and seen == [(20, 60), (30, 60), (40, 60), (50, 60), (60, 60)]
    assert resumed == evaluate(data, Recorder().subject())
    again = Recorder(stop_after=0)
    assert evaluate(data, again.subject(), resume_path=path) == resumed
    assert evaluate(data, again.subject(), resume_path=path, limit=12).line("all").count == 12


def test_a_torn_last_line_is_dropped_and_made_again(tmp_path):
    data, path = make.sugarcrepe_items(12), tmp_path / "scores.jsonl"
    whole = evaluate(data, Recorder().subject(), resume_path=path)
    text = path.read_text()
    path.write_text(text[:-20])
    recorder = Recorder()
    assert evaluate(data, recorder.subject(), resume_path=path) == whole
    assert len(recorder.asked) == 1 and len(recorder.asked[0][0]) == 2
    assert sorted(path.read_text().splitlines()) == sorted(text.splitlines())
    path.write_text(text[:10])
    assert evaluate(data, Recorder().subject(), resume_path=path) == whole


def test_scores_of_another_evaluation_are_refused(tmp_path):
    data, path = make.sugarcrepe_items(12), tmp_path / "scores.jsonl"
    evaluate(data, Recorder().subject(), resume_path=path)
    for dataset, subject, word in (
        (make.sugarcrepe_items(15), Recorder().subject(), "dataset must be"),
        (data, Recorder().subject("other"), "subject must be 'other', got 'recorder'"),
        (data, Subject("recorder", "v2", Recorder(), reads_images=False), "model must be 'v2', got 'v1'"),
        (make.group_items(count=12), Recorder().subject(), "benchmark must be 'bivlc', got 'sugarcrepe'"),
    ):
        with pytest.raises(ValueError, match=rf"belongs to another evaluation: .*{word}"):
            evaluate(dataset, subject, resume_path=path)


def test_a_broken_score_file_is_refused_by_line_and_left_as_it_is(tmp_path):
    data, path = make.sugarcrepe_items(3), tmp_path / "scores.jsonl"
    name = data.items[0].id
    header = json.dumps(terms_of(data, Recorder().subject()).header)
    good = json.dumps({"id": name, "scores": [[1.0, 2.0]]})
    for body, message in (
        ("{broken\n{}\n", "line 2 must be JSON"),
        ("[1]\n", "line 2 must be an object"),
        ("[" * 100_000 + "\n", "line 2 must be JSON"),
        ("{}\n", "line 2: id must be an item of sugarcrepe, got None"),
        (f'{good}\n{{"id": ["x"]}}\n', r"line 3: id must be an item of sugarcrepe, got \['x'\]"),
        ('{"id": "gone", "scores": [[1.0, 2.0]]}\n', "line 2: id must be an item of sugarcrepe, got 'gone'"),
        (f"{good}\n{good}\n", f"line 3 must be the only record of an id, got '{name}'"),
        (f'{{"id": "{name}"}}\n', "line 2: scores must be 1 x 2 finite numbers, got None"),
        (f'{{"id": "{name}", "scores": [[1.0, 2.0, 3.0]]}}\n', "line 2: scores must be 1 x 2 finite numbers, got"),
        (f'{{"id": "{name}", "scores": [[1.0], [2.0]]}}\n', "line 2: scores must be 1 x 2 finite numbers, got"),
        (f'{{"id": "{name}", "scores": [[1.0, "2"]]}}\n', "line 2: scores must be 1 x 2 finite numbers, got"),
        (f'{{"id": "{name}", "scores": [[1.0, NaN]]}}\n', "line 2: scores must be 1 x 2 finite numbers, got"),
        (f'{{"id": "{name}", "scores": [[1.0, 1{"0" * 400}]]}}\n', "line 2: scores must be 1 x 2 finite numbers"),
        (f'{{"id": "{name}", "scores": [[1.0, true]]}}\n', "line 2: scores must be 1 x 2 finite numbers, got"),
        (f'{{"id": "{name}", "scores": [[1.0, 2.0]], "cut": "no"}}\n', "line 2: cut must be true or false, got 'no'"),
    ):
        path.write_text(f"{header}\n{body}")
        before = path.read_bytes()
        with pytest.raises(ValueError, match=rf"score file: .*scores\.jsonl {message}"):
            evaluate(data, Recorder().subject(), resume_path=path)
        assert path.read_bytes() == before


def test_a_broken_record_of_a_query_is_refused(tmp_path):
    data, path = make.retrieval_items(4, 1), tmp_path / "scores.jsonl"
    evaluate(data, Recorder().subject(), resume_path=path)
    header, first, *_ = path.read_text().splitlines()
    good = json.loads(first)
    for change, message in (
        ({"id": "text/4"}, "id must be an item of negbench_retrieval, got 'text/4'"),
        ({"own": [1, 2]}, r"own must be three whole numbers of at least 0, got \[1, 2\]"),
        ({"any": [1, 2, -1]}, r"any must be three whole numbers of at least 0, got \[1, 2, -1\]"),
        ({"any": [1, 2, 0.5]}, "any must be three whole numbers"),
        ({"margin": "wide"}, "margin must be a finite number or null, got 'wide'"),
    ):
        path.write_text(f"{header}\n{json.dumps(good | change)}\n")
        with pytest.raises(ValueError, match=f"line 2: {message}"):
            evaluate(data, Recorder().subject(), resume_path=path)
    path.write_text(f"{header}\n{json.dumps({key: good[key] for key in ('id', 'own', 'any')})}\n")
    with pytest.raises(ValueError, match="line 2: margin must be a finite number or null, got 'nothing'"):
        evaluate(data, Recorder().subject(), resume_path=path)


@pytest.mark.parametrize("content", ['{"figure": 1}', "a line without an end", "[1, 2, 3]", "\xe9", '{"format": 2}'])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_file_that_is_no_score_file_is_left_as_it_is(tmp_path, content, end):
    data, path = make.sugarcrepe_items(3), tmp_path / "precious.json"
    path.write_text(content + end)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"score file: .*precious\.json"):
        evaluate(data, Recorder().subject(), resume_path=path)
    with pytest.raises(ValueError, match=r"score file: .*precious\.json"):
        merge_score_files([path], tmp_path / "all", terms_of(data, Recorder().subject()))
    assert path.read_bytes() == before and not (tmp_path / "all").exists()


def test_an_empty_file_and_a_torn_header_are_begun_anew(tmp_path):
    data, path = make.sugarcrepe_items(3), tmp_path / "scores.jsonl"
    path.touch()
    whole = evaluate(data, Recorder().subject(), resume_path=path)
    text = path.read_bytes()
    path.write_bytes(text[:30])
    assert evaluate(data, Recorder().subject(), resume_path=path) == whole and path.read_bytes() == text
    path.write_bytes(text[:30] + b"?")
    with pytest.raises(ValueError, match=r"must be empty or begin with the header of a score file, got b'{"):
        evaluate(data, Recorder().subject(), resume_path=path)
    assert path.read_bytes() == text[:30] + b"?"


@pytest.mark.parametrize(
    "factory", [make.sugarcrepe_items, make.group_items, lambda: make.retrieval_items(12)], ids=str
)
def test_shards_merged_are_the_whole(tmp_path, factory):
    data = factory()
    paths = [tmp_path / f"{k}.jsonl" for k in range(3)]
    for k, path in enumerate(paths):
        part = evaluate(data, Recorder().subject(), shard=(k, 3), resume_path=path)
        assert f"shard {k} of 3" in part.edition
    merged = tmp_path / "all.jsonl"
    terms = terms_of(data, Recorder().subject())
    assert merge_score_files(paths, merged, terms) == len(data)
    nothing = Recorder(stop_after=0)
    assert evaluate(data, nothing.subject(), resume_path=merged) == evaluate(data, Recorder().subject())
    before = merged.read_bytes()
    for again in (paths, [paths[1]], [merged]):
        assert merge_score_files(again, merged, terms) == len(data) and merged.read_bytes() == before


def test_merging_refuses_what_does_not_belong_together_and_writes_nothing(tmp_path):
    data = make.sugarcrepe_items(3)
    terms, target = terms_of(data, Recorder().subject()), tmp_path / "m"
    for file, score in (("a", 1.0), ("b", 2.0)):
        ScoreFile(tmp_path / file, terms).add([{"id": data.items[0].id, "scores": [[score, 0.0]]}])
    ScoreFile(tmp_path / "c", terms_of(data, Recorder().subject("other")))
    for files, message in (
        (["a", "b"], "item 'add_att/0' has two different scores"),
        (["a", "c"], "belongs to another evaluation"),
        ([], "needs at least one file"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_score_files([tmp_path / file for file in files], target, terms)
        assert not target.exists()
    merge_score_files([tmp_path / "a"], target, terms)
    before = target.read_bytes()
    with pytest.raises(ValueError, match=r"has two different scores, one in .*b"):
        merge_score_files([tmp_path / "b"], target, terms)
    assert target.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "m"]


def test_scores_of_changed_pictures_are_refused(tmp_path):
    def choice(path):
        item = Item("0", (ImageRef(path.name, path),), ("red", "blue"), 0)
        return Dataset("colours", "1 item", Rule(CHOICE), (item,))

    picture, scores = tmp_path / "red.png", tmp_path / "scores.jsonl"
    picture.write_bytes(b"one")
    evaluate(choice(picture), Recorder().subject(), resume_path=scores)
    picture.write_bytes(b"two")
    evaluate(choice(picture), Recorder(stop_after=0).subject(), resume_path=scores)
    picture.write_bytes(b"three")
    with pytest.raises(ValueError, match="belongs to another evaluation: dataset must be"):
        evaluate(choice(picture), Recorder().subject(), resume_path=scores)
    data = RetrievalDataset("r", "1 image", (ImageRef("red.png", picture),), ("red",), (0,))
    picture.write_bytes(b"four")
    assert RetrievalDataset("r", "1 image", (ImageRef("red.png", picture),), ("red",), (0,)) != data
