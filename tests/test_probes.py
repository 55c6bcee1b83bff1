"""Probes: they find what is there, find nothing where nothing is, and read what their tap names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from engine.encoders.scenes import load_scenes
from engine.engine import Engine
from engine.features import Needs
from engine.heads.probes import CentroidProbe, LinearProbe, probe_vectors
from tests.head_cases import make_images, make_texts

PROBES = (LinearProbe, CentroidProbe)


def blobs(n: int, seed: int, spread: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes around three orthogonal directions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=generator)
    return 2 * torch.eye(8)[labels] + spread * torch.randn(n, 8, generator=generator), labels


@pytest.mark.parametrize("kind", PROBES)
def test_classes_that_are_apart_are_found_and_noise_is_not(kind):
    probe = kind.fit(*blobs(200, 0), 3)
    assert probe.accuracy(*blobs(200, 1)) > 0.95
    x, labels = blobs(400, 2)
    shuffled = labels[torch.randperm(400)]
    assert kind.fit(x, shuffled, 3).accuracy(*blobs(300, 3)) < 0.5


def test_the_linear_probe_is_at_the_minimum_of_its_loss():
    x, labels = blobs(60, 0, spread=2.0)
    probe = LinearProbe.fit(x, labels, 3, decay=1e-2, steps=300)
    weight, bias = probe.weight.clone().requires_grad_(), probe.bias.clone().requires_grad_()
    z = (x - x.mean(dim=0)) / x.std(dim=0, correction=0)
    loss = functional.cross_entropy(z @ weight.T + bias, labels) + 1e-2 * weight.square().sum()
    for gradient in torch.autograd.grad(loss, (weight, bias)):
        assert float(gradient.abs().max()) < 1e-4
    assert torch.equal(probe.weight, LinearProbe.fit(x, labels, 3, decay=1e-2, steps=300).weight)


def test_the_linear_probe_does_not_care_for_shift_and_scale():
    x, labels = blobs(100, 0)
    moved = 30 * x + 7
    torch.testing.assert_close(
        LinearProbe.fit(moved, labels, 3).scores(moved), LinearProbe.fit(x, labels, 3).scores(x), rtol=0.02, atol=0.02
    )


def test_the_centroid_probe_is_the_cosine_to_the_means():
    x, labels = blobs(50, 0)
    asked, _ = blobs(5, 1)
    means = torch.stack([x[labels == k].mean(dim=0) for k in range(3)])
    expected = functional.normalize(asked, dim=-1) @ functional.normalize(means, dim=-1).T
    torch.testing.assert_close(CentroidProbe.fit(x, labels, 3).scores(asked), expected)
    assert bool((CentroidProbe.fit(x, labels, 4).scores(asked)[:, 3] == 0).all())


def test_taps_name_vectors():
    images, texts = make_images(3), make_texts(3)
    words = texts.hidden[2][2, 1:4]
    cases = [
        (images, "embedding", images.embedding),
        (images, "patches", images.patches.mean(dim=1)),
        (images, "hidden.1", images.hidden[1][:, 1:].mean(dim=1)),
        (images, "hidden.2.class", images.hidden[2][:, 0]),
        (texts, "embedding", texts.embedding),
        (texts, "hidden.1.class", torch.stack([texts.hidden[1][i, 2 + i] for i in range(3)])),
    ]
    for features, tap, expected in cases:
        torch.testing.assert_close(probe_vectors(features, tap, patches=6), expected)
    torch.testing.assert_close(probe_vectors(texts, "hidden.2")[2], words.mean(dim=0))
    torch.testing.assert_close(probe_vectors(texts, "tokens")[0], texts.tokens[0, 1])
    half = replace(images, patch_mask=torch.tensor([[True] * 2 + [False] * 4] * 3))
    torch.testing.assert_close(probe_vectors(half, "patches"), images.patches[:, :2].mean(dim=1))


@pytest.mark.parametrize("tap", ["hidden.7", "hidden.x", "hidden.1.last", "tokens", "other"])
def test_taps_that_are_not_there_are_refused(tap):
    with pytest.raises(ValueError, match=f"the features must hold what tap '{tap}' names"):
        probe_vectors(make_images(1), tap, patches=6)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"needs their number of patches, 1 to 7, got 0"):
        probe_vectors(make_images(1), "hidden.1")
    x, labels = blobs(10, 0)
    for kind in PROBES:
        with pytest.raises(ValueError, match=rf"{kind.__name__}: wants vectors .* got \(10, 8\) and int64 \(9,\)"):
            kind.fit(x, labels[:9], 3)
        with pytest.raises(ValueError, match=f"{kind.__name__}: labels must be in 0..1 of at least two classes, got 0"):
            kind.fit(x, labels, 2)


def test_colours_of_plain_pictures_are_read_off_the_embedded_model():
    peaksim = Engine(load_scenes())
    colours = np.array([[200, 30, 30], [30, 160, 50], [40, 60, 210]])
    labels = torch.arange(24) % 3
    noise = np.random.default_rng(0).integers(-25, 25, (24, 3))
    pictures = [
        Image.new("RGB", (96, 96), tuple(int(v) for v in (colours[k] + d).clip(0, 255)))
        for k, d in zip(labels.tolist(), noise, strict=True)
    ]
    features = peaksim.encode_images(pictures, scorer=Needs(image_layers=(2,)))
    x = probe_vectors(features, "hidden.2", patches=36)
    for kind in PROBES:
        assert kind.fit(x[:12], labels[:12], 3).accuracy(x[12:], labels[12:]) == 1.0
