"""The scorers against plain loops, their options, what they refuse, and what they explain."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from engine.features import ImageFeatures, TextFeatures
from engine.scorers.base import Scorer
from engine.scorers.global_cosine import GlobalCosine
from engine.scorers.max_sim import MaxSim, patch_box
from engine.scorers.sgi import SGI
from tests.scorer_cases import D, make_images, make_texts
from tests.tolerances import assert_close


def loop_max_sim(scorer: MaxSim, images: ImageFeatures, texts: TextFeatures, i: int, j: int) -> float:
    words = [texts.tokens[j, t] for t in range(texts.tokens.shape[1]) if texts.token_mask[j, t]]
    patches = [images.patches[i, p] for p in range(images.patches.shape[1]) if images.patch_mask[i, p]]

    def best(values: list[float]) -> float:
        if scorer.temperature is None:
            return max(values)
        return scorer.temperature * math.log(sum(math.exp(v / scorer.temperature) for v in values))

    def one_way(asking: list[torch.Tensor], answering: list[torch.Tensor]) -> float:
        found = [best([float(a @ b) for b in answering]) for a in asking]
        return sum(found) / (len(found) if scorer.reduction == "mean" else 1)

    ways = {
        "text_to_image": [one_way(words, patches)],
        "image_to_text": [one_way(patches, words)],
        "symmetric": [one_way(words, patches), one_way(patches, words)],
    }[scorer.direction]
    return sum(ways) / len(ways)


def loop_sgi(scorer: SGI, images: ImageFeatures, texts: TextFeatures, i: int, j: int) -> float:
    parts = []
    for s in range(texts.segments.shape[1]):
        if not texts.segment_mask[j, s]:
            continue
        sign = 1.0
        if texts.segment_negated[j, s] and scorer.negation != "keep":
            sign = 0.0 if scorer.negation == "ignore" else -1.0
        if sign:
            parts.append((texts.segments[j, s], sign))
    if scorer.full_caption or not parts:
        parts.append((texts.embedding[j], 1.0))
    regions = [images.regions[i, r] for r in range(images.regions.shape[1]) if images.region_mask[i, r]]
    table = [[float(vector @ region) for region in regions] for vector, _ in parts]
    if scorer.exclusive:
        size = min(len(parts), len(regions))
        choices = [
            list(zip(rows, columns, strict=True))
            for rows in itertools.combinations(range(len(parts)), size)
            for columns in itertools.permutations(range(len(regions)), size)
        ]
        best = max(choices, key=lambda pairs: sum(table[s][r] for s, r in pairs))
        return sum(parts[s][1] * table[s][r] for s, r in best) / len(parts)
    return sum(sign * max(row) for (_, sign), row in zip(parts, table, strict=True)) / len(parts)


MAX_SIMS = [
    MaxSim(direction=direction, reduction=reduction, temperature=temperature)
    for direction in ("text_to_image", "image_to_text", "symmetric")
    for reduction in ("mean", "sum")
    for temperature in (None, 0.1)
]
SGIS = [
    SGI(full_caption=full_caption, exclusive=exclusive, negation=negation)
    for full_caption in (False, True)
    for exclusive in (False, True)
    for negation in ("ignore", "subtract", "keep")
]


def check_against_loop(scorer: Scorer, loop, images: ImageFeatures, texts: TextFeatures) -> None:
    expected = torch.tensor(
        [[loop(scorer, images, texts, i, j) for j in range(len(texts))] for i in range(len(images))]
    )
    scores = scorer.matrix(images, texts)
    assert scores.dtype == torch.float32
    assert_close(scores, expected, what=repr(scorer))
    rows, columns = torch.meshgrid(torch.arange(len(images)), torch.arange(len(texts)), indexing="ij")
    pairs = scorer.pairs(images[rows.flatten()], texts[columns.flatten()])
    assert pairs.dtype == torch.float32
    assert_close(pairs.reshape(expected.shape), expected, what=f"pairs of {scorer!r}")


def test_global_is_the_cosine():
    def loop(_, images, texts, i, j):
        return float(sum(a * b for a, b in zip(images.embedding[i], texts.embedding[j], strict=True)))

    check_against_loop(GlobalCosine(), loop, make_images(), make_texts())


@pytest.mark.parametrize("scorer", MAX_SIMS, ids=str)
def test_max_sim_is_the_loop(scorer: MaxSim):
    check_against_loop(scorer, loop_max_sim, make_images(), make_texts())


@pytest.mark.parametrize("scorer", MAX_SIMS, ids=str)
def test_max_sim_without_masks_counts_every_position(scorer: MaxSim):
    images, texts = make_images(), make_texts()
    images = replace(images, patch_mask=torch.ones_like(images.patch_mask))
    texts = replace(texts, token_mask=torch.ones_like(texts.token_mask))
    masked = scorer.matrix(images, texts)
    assert_close(scorer.matrix(replace(images, patch_mask=None), replace(texts, token_mask=None)), masked)
    assert_close(
        scorer.pairs(replace(images, patch_mask=None), replace(texts, token_mask=None)[:3]),
        masked.diagonal(),
    )


@pytest.mark.parametrize("scorer", SGIS, ids=str)
def test_sgi_is_the_loop(scorer: SGI):
    check_against_loop(scorer, loop_sgi, make_images(), make_texts())


def test_sgi_with_more_segments_than_regions_leaves_some_without():
    scorer = SGI(exclusive=True)
    check_against_loop(scorer, loop_sgi, make_images(regions=2), make_texts(segments=4))


def test_sgi_without_flags_counts_all_segments():
    texts = make_texts()
    plain = replace(texts, segment_negated=None)
    assert_close(SGI().matrix(make_images(), plain).shape[0], 3)
    images = make_images()
    assert_close(SGI().matrix(images, plain), SGI(negation="keep").matrix(images, texts))


def test_finding_what_is_denied_does_not_raise_the_score():
    red, blue = torch.eye(D)[:2]
    absent = -torch.ones(D) / math.sqrt(D)
    images = ImageFeatures(
        torch.stack([red, red]), regions=torch.stack([torch.stack([red, absent]), torch.stack([red, blue])])
    )
    texts = TextFeatures(
        red[None], segments=torch.stack([red, blue])[None], segment_negated=torch.tensor([[False, True]])
    )
    without, with_blue = SGI().matrix(images, texts)[:, 0].tolist()
    assert without == with_blue == 1.0
    without, with_blue = SGI(negation="subtract").matrix(images, texts)[:, 0].tolist()
    assert with_blue < without
    without, with_blue = SGI(negation="keep").matrix(images, texts)[:, 0].tolist()
    assert with_blue > without


def test_a_caption_without_segments_is_scored_as_a_whole():
    images, texts = make_images(), make_texts()
    texts = replace(texts, segment_mask=torch.zeros_like(texts.segment_mask))
    best = (images.regions @ texts.embedding.T).masked_fill(~images.region_mask[..., None], -torch.inf).amax(1)
    assert_close(SGI().matrix(images, texts), best)


def test_exclusive_gives_two_segments_two_regions():
    vectors = torch.eye(D)[:2]
    images = ImageFeatures(vectors[:1], regions=vectors[None])
    texts = TextFeatures(vectors[:1], segments=vectors[[0, 0]][None])
    assert SGI().matrix(images, texts).item() == 1.0
    assert SGI(exclusive=True).matrix(images, texts).item() == 0.5


@pytest.mark.parametrize("scorer", [GlobalCosine(), *MAX_SIMS, *SGIS], ids=str)
def test_the_matches_add_up_to_the_score(scorer: Scorer):
    images, texts = make_images(), make_texts()
    for i, j in ((0, 0), (1, 1), (2, 2), (2, 3)):
        found = scorer.matches(images[i], texts[j])
        total = sum(match.score * match.weight for match in found)
        score = float(scorer.pairs(images[i], texts[j]))
        if getattr(scorer, "temperature", None) is None:
            assert total == pytest.approx(score, abs=1e-5)
        else:
            assert total < score + 1e-6  # equal where there is one partner to choose from


def test_global_matches_the_caption_with_the_whole_image():
    (match,) = GlobalCosine().matches(make_images()[0], make_texts()[1])
    assert (match.text, match.box, match.weight) == ("caption 1", (0, 0, 30, 20), 1.0)
    bare = replace(make_images()[0], sizes=None)
    (match,) = GlobalCosine().matches(bare, replace(make_texts()[0], texts=None))
    assert (match.text, match.box) == ("caption", (0, 0, 0, 0))


def test_max_sim_matches_name_words_and_patch_rectangles():
    images, texts = make_images()[1], make_texts()[0]
    found = MaxSim().matches(images, texts)
    assert [match.text for match in found] == ["word01", "word02", "word03"]
    similarity = texts.tokens[0] @ images.patches[0].T
    for match, token in zip(found, (1, 2, 3), strict=True):
        row, column = divmod(int(similarity[token].argmax()), 3)
        assert match.box == (column * 10, row * 10, column * 10 + 10, row * 10 + 10)
    reverse = MaxSim(direction="image_to_text").matches(images, texts)
    assert len(reverse) == 6 and {match.text for match in reverse} <= {"word01", "word02", "word03"}
    assert [match.box for match in reverse] == [patch_box(images, patch) for patch in range(6)]
    assert MaxSim().matches(images, replace(texts, token_texts=None))[0].text == "token 1"
    assert MaxSim().matches(replace(images, views=None), texts)[0].box == (0, 0, 0, 0)


def test_sgi_matches_name_segments_boxes_and_what_does_not_count():
    images, texts = make_images()[0], make_texts()[2]
    found = SGI().matches(images, texts)
    assert [match.text for match in found] == ["not: segment 20", "segment 21", "segment 22"]
    assert [match.weight for match in found] == [0.0, 0.5, 0.5]
    best = int((images.regions[0] @ texts.segments[0, 1]).argmax())
    assert list(found[1].box) == images.boxes[0, best].tolist()
    whole = SGI().matches(images, make_texts()[3])
    assert whole[-1].text == "caption 3" and whole[-1].weight == 1.0
    assert SGI().matches(replace(images, boxes=None), texts)[1].box == (0, 0, 0, 0)


@pytest.mark.parametrize("scorer", [GlobalCosine(), MaxSim(), SGI(), SGI(exclusive=True)], ids=str)
def test_rows_do_not_depend_on_their_neighbours(scorer: Scorer):
    images, texts = make_images(), make_texts()
    scores = scorer.matrix(images, texts)
    assert_close(scorer.matrix(images[[2, 0]], texts[[3, 1]]), scores[[2, 0]][:, [3, 1]])


def test_padding_and_the_order_of_patches_and_segments_change_nothing():
    images, texts = make_images(), make_texts()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = replace(images, patches=images.patches[:, order], patch_mask=images.patch_mask[:, order])
    assert_close(MaxSim().matrix(shuffled, texts), MaxSim().matrix(images, texts))
    padded = replace(
        texts,
        segments=torch.cat([texts.segments, torch.full((4, 2, D), torch.nan)], dim=1),
        segment_mask=torch.cat([texts.segment_mask, torch.zeros(4, 2).bool()], dim=1),
        segment_negated=torch.cat([texts.segment_negated, torch.zeros(4, 2).bool()], dim=1),
    )
    assert_close(SGI().matrix(images, padded), SGI().matrix(images, texts))
    assert_close(SGI().pairs(images, padded[:3]), SGI().pairs(images, texts[:3]))


def test_nan_in_a_part_that_counts_shows_and_elsewhere_does_not():
    images, texts = make_images(), make_texts()
    images.patches[0, -1] = torch.nan  # masked
    assert MaxSim().matrix(images, texts).isfinite().all()
    images.patches[1, 0] = torch.nan
    scores = MaxSim().matrix(images, texts)
    assert scores[1].isnan().all() and scores[[0, 2]].isfinite().all()
    assert MaxSim().pairs(images, texts[:3]).isnan().tolist() == [False, True, False]


BIG = """
import torch
from engine.features import ImageFeatures, TextFeatures
from engine.scorers.sgi import SGI
def peak():
    # Not ru_maxrss: that begins with what the parent had.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
torch.set_num_threads(1)
n, parts, d = 1000, 8, 8
images = ImageFeatures(torch.randn(n, d), regions=torch.randn(n, parts, d))
texts = TextFeatures(torch.randn(n, d), segments=torch.randn(n, parts - 1, d))
SGI().matrix(images[:2], texts[:2])
before = peak()
SGI().matrix(images, texts)
print(peak() - before)
"""


def test_a_large_matrix_never_holds_all_similarities_at_once():
    # All similarities at once would be 1000 · 1000 · 8 · 8 float32 numbers, 256 MB; the result is 4 MB.
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 120 * 1024
