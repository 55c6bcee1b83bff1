"""The registry of scorers, their options, and the features they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from engine.choices import GridName
from engine.cli.options import scorer_with
from engine.crops import CROP_GRIDS
from engine.features import RegionPlan, TextFeatures
from engine.scorers.base import Scorer
from engine.scorers.global_cosine import GlobalCosine
from engine.scorers.max_sim import MaxSim
from engine.scorers.registry import SCORERS, get_scorer
from engine.scorers.sgi import SGI
from tests.scorer_cases import make_images, make_texts, unit


def test_numbers_with_commas_are_colours_alone():
    assert scorer_with("sgi", ("fill=1,2,3",)) == SGI(fill=(1, 2, 3))
    assert scorer_with("linear", ("head=1,2,3",)).head == "1,2,3"
    assert scorer_with("sgi", ("head=1,2,3", "crops=windows")).head == "1,2,3"


def test_the_registry_knows_its_scorers_and_says_so():
    trained = ["linear", "max_sim_head", "peakpatch", "tfglobal", "tflocal"]
    assert sorted(SCORERS) == sorted(["global", "max_sim", "sgi", *trained])
    assert get_scorer("sgi") == SGI()
    own = MaxSim(reduction="sum")
    assert get_scorer(own) is own
    with pytest.raises(ValueError, match=r"scorer: must be one of 'global', 'linear', .*'tflocal', got 'maxsim'"):
        get_scorer("maxsim")
    with pytest.raises(TypeError, match="scorer: must be a name or a Scorer object, got int"):
        get_scorer(3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaxSim(direction="both"), "direction must be one of 'text_to_image', .* got 'both'"),
        (lambda: MaxSim(reduction="max"), "reduction must be one of 'mean', 'sum', got 'max'"),
        (lambda: MaxSim(temperature=0.0), "max_sim: temperature must be between 1e-30 and 1e30, got 0.0"),
        (lambda: MaxSim(backend="gpu"), "max_sim: backend must be one of 'auto', .* got 'gpu'"),
        (lambda: SGI(backend="gpu"), "sgi: backend must be one of 'auto', .* got 'gpu'"),
        (lambda: MaxSim(temperature=float("nan")), "max_sim: temperature must be between 1e-30 and 1e30, got nan"),
        (lambda: MaxSim(direction=None), "direction must be one of 'text_to_image', .* got None"),
        (lambda: SGI(grid="fine"), "sgi: grid must be one of 'none', 'scenes', 'multi_scale', 'dense', got 'fine'"),
        (lambda: SGI(grid=["none"]), r"sgi: grid must be one of .* got \['none'\]"),
        (lambda: SGI(fill=None), "sgi: fill must be three numbers 0..255 or a name .* got None"),
        (lambda: SGI(fill=(0, 0, "a")), r"sgi: fill must be three numbers 0..255 or a name .* got \(0, 0, 'a'\)"),
        (lambda: SGI(fill="white"), "sgi: fill must be one of 'border', 'mean', got 'white'"),
        (lambda: SGI(fill=(0, 0, 256)), r"0..255 or a name \('border', 'mean'\), got \(0, 0, 256\)"),
        (lambda: SGI(crops="big"), "crops must be one of 'rescaled', 'native', 'windows', got 'big'"),
        (lambda: SGI(negation="flip"), "negation must be one of 'ignore', 'subtract', 'keep', got 'flip'"),
        (
            lambda: SGI(template="a photo"),
            r"template must hold \{\} once, where the segment goes, got 'a photo'",
        ),
        (lambda: SGI(grid="none", full_image=False).needs(), None),
    ],
)
def test_options_are_checked_when_they_are_given(make, message: str | None):
    if message is None:
        make()
        return
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaxSim(temperature="0.1"), "max_sim: temperature must be a number or None, got str"),
        (lambda: MaxSim(temperature=True), "max_sim: temperature must be a number or None, got bool"),
        (lambda: MaxSim(tap=1), "max_sim: tap must be a name or None, got int"),
        (lambda: SGI(full_image="no"), "sgi: full_image must be True or False, got 'no'"),
        (lambda: SGI(full_caption=1), "sgi: full_caption must be True or False, got 1"),
        (lambda: SGI(exclusive=None), "sgi: exclusive must be True or False, got None"),
        (lambda: SGI(template=None), "sgi: template must be a string, got NoneType"),
    ],
)
def test_options_of_another_type_are_refused(make, message: str):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grid": "fine"}, ValueError, "RegionPlan: grid must be one of 'none', 'scenes', 'multi_scale', 'dense'"),
        ({"mode": "squash"}, ValueError, "mode must be one of 'rescaled', 'native', 'windows', got 'squash'"),
        ({"fill": "white"}, ValueError, "RegionPlan: fill must be one of 'border', 'mean', got 'white'"),
        ({"fill": (1, 2)}, ValueError, r"RegionPlan: fill must be three numbers 0..255 or a name .* got \(1, 2\)"),
        ({"full_image": 1}, TypeError, "RegionPlan: full_image must be True or False, got 1"),
    ],
)
def test_a_plan_of_regions_is_checked_when_it_is_made(options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        RegionPlan(**options)


def test_every_named_grid_exists():
    assert sorted(get_args(GridName)) == sorted(CROP_GRIDS)


def test_what_the_options_ask_of_the_encoder():
    assert GlobalCosine().needs().regions is None
    needs = SGI(grid="dense", crops="native", fill="mean", full_image=False, template="a photo of {}").needs()
    assert str(needs.regions) == "dense/native/mean/parts"
    assert needs.segments and needs.segment_template == "a photo of {}"
    needs = MaxSim(tap="value").needs()
    assert needs.patches and needs.aligned and needs.tokens and needs.tap == "value"


@pytest.mark.parametrize(
    ("scorer", "changes", "message"),
    [
        (
            MaxSim(),
            {"patches": None, "patch_mask": None, "grid": None},
            "max_sim: needs image patches, which the",
        ),
        (SGI(), {"regions": None, "region_mask": None, "boxes": None}, "sgi: needs image regions, which the"),
        (
            MaxSim(),
            {"aligned": False, "tap": "hidden"},
            "those of tap 'hidden' do not; use tap 'projected', 'value'",
        ),
        (MaxSim(tap="value"), {}, "patches must come from tap 'value', got 'projected'"),
        (
            SGI(crops="native"),
            {},
            "regions must follow the plan scenes/native/border/full, got scenes/rescaled/",
        ),
        (
            GlobalCosine(),
            {"fingerprint": "a"},
            "images were encoded by a and texts by b; both must come from one",
        ),
        (SGI(template="a {}"), {}, r"segments must be encoded in the template 'a \{\}', got '\{\}'"),
    ],
    ids=str,
)
def test_features_that_do_not_fit_are_refused(scorer: Scorer, changes: dict, message: str):
    images = replace(make_images(), **changes)
    texts = replace(make_texts(), fingerprint="b")
    with pytest.raises(ValueError, match=message):
        scorer.check(images, texts, aligned_taps=("projected", "value"))


def test_text_features_without_segments_are_refused():
    with pytest.raises(ValueError, match="sgi: needs text segments, which the features do not hold"):
        SGI().matrix(make_images(), TextFeatures(unit(2)))


def test_regions_of_the_users_own_fit_every_plan():
    images = replace(make_images(), region_plan="")
    assert SGI(crops="native").matrix(images, make_texts()).shape == (3, 4)


@pytest.mark.parametrize("exclusive", [False, True])
def test_an_image_without_regions_is_refused(exclusive: bool):
    images, texts = make_images(4), make_texts()
    images.region_mask[1] = False
    scorer = SGI(exclusive=exclusive)
    for score in (scorer.matrix, scorer.pairs):
        with pytest.raises(ValueError, match="sgi: every image needs a region, got none in image 1"):
            score(images, texts)
    bare = replace(images, regions=unit(4, 0), region_mask=None, boxes=None, ids=tuple("abcd"))
    with pytest.raises(ValueError, match=r"got none in image 0 \('a'\)"):
        scorer.matrix(bare, texts)


def test_pairs_of_unequal_number_are_refused():
    for scorer in (GlobalCosine(), MaxSim(), SGI()):
        with pytest.raises(ValueError, match="pairs need as many images as texts, got 3 images and 4 texts"):
            scorer.pairs(make_images(), make_texts())


def test_a_caption_without_a_word_has_nothing_to_match():
    texts = make_texts()
    texts.token_mask[2] = False
    with pytest.raises(ValueError, match=r"every text needs something to match, got none in text 2 \('caption 2'\)"):
        MaxSim().matrix(make_images(), texts)
