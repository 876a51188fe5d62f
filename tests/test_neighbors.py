"""Neighbours of images and of features: what is drawn, against loops over single pixels and the law behind a head."""

from __future__ import annotations

import colorsys
import itertools

import numpy as np
import pytest
import torch

import poise
from poise.neighbors import Additive, Augmented, ThroughLinear, TrainAugmentation, colors, moderate, strong, weak
from poise.noise import Gaussian
from poise.sampling import estimate

SIZE = 8


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def photos():
    return torch.rand(3, 3, SIZE, SIZE, generator=seeded())


def neighbors_of(images, neighbors, num_samples=40, strength=1.0, seed=1):
    z = neighbors.draw(images, num_samples, seeded(seed))
    return neighbors.place(images, z, strength), z


# Crop and flip


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_weak_neighbors_are_crops_and_flips(photos, padding, flip):
    """Each is one of the (2p + 1)² · 2 that can be made, and every one of them comes up."""
    pad = 1 if padding is None else padding
    found, _ = neighbors_of(photos, weak(padding=padding, flip=flip), 60 * (2 * pad + 1) ** 2)
    padded = np.pad(photos.numpy(), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    for image, neighbors in zip(padded, found.transpose(0, 1).numpy(), strict=True):
        possible = {}
        for y, x, mirrored in itertools.product(range(2 * pad + 1), range(2 * pad + 1), range(1 + flip)):
            crop = image[:, y : y + SIZE, x : x + SIZE]
            possible[(crop[:, :, ::-1] if mirrored else crop).tobytes()] = (y, x, mirrored)
        came = [possible[one.tobytes()] for one in neighbors]
        counts = np.array([came.count(place) for place in possible.values()])
        expected = len(came) / len(possible)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < len(possible) + 6 * (2 * len(possible)) ** 0.5


def test_images_of_a_batch_move_by_themselves(photos):
    same = photos[:1].expand(50, -1, -1, -1)
    found, _ = neighbors_of(same, weak(), 1)
    assert len(found[0].flatten(1).unique(dim=0)) > 10


@pytest.mark.parametrize("neighbors", [weak(), moderate(0.3), strong()], ids=["weak", "moderate", "strong"])
def test_a_longer_table_begins_with_the_same_rows(neighbors):
    images = torch.rand(70, 3, SIZE, SIZE, generator=seeded())
    how = {"neighbors": neighbors, "strength": 1.0, "num_samples": 7, "head": lambda x: x.mean((2, 3))}
    whole = estimate(images, **how)
    for rows in (1, 64, 65):
        assert torch.equal(estimate(images[:rows], **how), whole[:rows])
    assert not torch.equal(estimate(images, seed=1, **how), whole)


# Colours, against pixels one by one


def gray(image):
    return image[0] * 0.299 + image[1] * 0.587 + image[2] * 0.114


def brightness(image, factor):
    return np.clip(image * factor, 0, 1)


def contrast(image, factor):
    return np.clip(image * factor + gray(image).mean() * (1 - factor), 0, 1)


def saturation(image, factor):
    return np.clip(image * factor + gray(image) * (1 - factor), 0, 1)


def hue(image, turn):
    result = np.empty_like(image)
    for y, x in itertools.product(range(image.shape[1]), range(image.shape[2])):
        h, s, v = colorsys.rgb_to_hsv(*image[:, y, x])
        result[:, y, x] = colorsys.hsv_to_rgb((h + turn) % 1, s, v)
    return result


def blurred(image, sigma):
    side = np.exp(-0.5 / sigma**2)
    weight = np.array([side, 1, side]) / (1 + 2 * side)
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1)), mode="reflect")
    rows = sum(weight[i] * padded[:, i : i + image.shape[1]] for i in range(3))
    return sum(weight[i] * rows[:, :, i : i + image.shape[2]] for i in range(3))


def by_pixels(image, u, s, blur):
    """Of one image and its eight numbers, after crop and flip."""
    low = max(0, 1 - s)
    factors = low + (1 + s - low) * u[3:6]
    image = saturation(contrast(brightness(image, factors[0]), factors[1]), factors[2])
    image = hue(image, min(s, 0.5) * (2 * u[6] - 1))
    return blurred(image, 0.1 + 1.9 * u[7]) if blur else image


@pytest.mark.parametrize("neighbors", [moderate(0.1), moderate(0.5), moderate(1.5), strong(0.2)])
def test_colors_are_jittered_as_written(photos, neighbors):
    found, z = neighbors_of(photos, neighbors, 4)
    plain, _ = neighbors_of(photos, weak(), 4)
    for draw, row in itertools.product(range(4), range(3)):
        numbers = z[draw, row].double().numpy()
        expected = by_pixels(plain[draw, row].double().numpy(), numbers, neighbors.jitter, neighbors.blur)
        np.testing.assert_allclose(found[draw, row], expected, atol=2e-5)


CHANGES = ("brightness", "contrast", "saturation", "hue", "blur")


def kornias(images, change, number):
    from kornia import enhance, filters

    if change == "blur":
        return filters.gaussian_blur2d(images, (3, 3), number[:, None].expand(-1, 2))
    return {
        "brightness": enhance.adjust_brightness_accumulative,
        "contrast": enhance.adjust_contrast_with_mean_subtraction,
        "saturation": enhance.adjust_saturation_with_gray_subtraction,
        "hue": lambda x, turn: enhance.adjust_hue(x, 2 * torch.pi * turn),
    }[change](images, number)


def torchvisions(images, change, number):
    functional = pytest.importorskip("torchvision.transforms.v2.functional", exc_type=ImportError)
    one = {
        "blur": lambda image, deviation: functional.gaussian_blur(image, [3, 3], [deviation, deviation]),
    }.get(change) or getattr(functional, f"adjust_{change}")
    return torch.stack([one(image, float(own)) for image, own in zip(images, number, strict=True)])


@pytest.mark.parametrize("library", [kornias, torchvisions])
@pytest.mark.parametrize("change", CHANGES)
def test_colors_change_as_in_the_libraries(change, library):
    images = torch.rand(20, 3, SIZE, SIZE, generator=seeded())
    images[0], images[1, 0], images[2, :, :4] = 0.5, 0.25, 0.0
    number = torch.linspace(-0.5, 0.5, 20) if change == "hue" else torch.linspace(0.1, 2, 20)
    found = getattr(colors, change)(images, number)
    # The weights of gray are rounded in torchvision.
    torch.testing.assert_close(found, library(images, change, number), rtol=0, atol=2e-3)


def test_a_wide_blur_is_kornias():
    from kornia import filters

    images, deviation = torch.rand(4, 3, 90, 70, generator=seeded()), torch.tensor([0.1, 0.5, 1.0, 2.0])
    expected = filters.gaussian_blur2d(images, (7, 7), deviation[:, None].expand(-1, 2))
    torch.testing.assert_close(colors.blur(images, deviation), expected, rtol=0, atol=1e-5)


def test_the_strength_is_the_jitter(photos):
    """The same draws at every strength, and none of them left at zero."""
    for s in (0.0, 0.2):
        searched, _ = neighbors_of(photos, moderate(), strength=s)
        given, _ = neighbors_of(photos, moderate(s) if s else weak())
        assert torch.equal(searched, given)
    assert moderate().has_strength
    assert not weak().has_strength
    assert not strong(0.1).has_strength


def test_images_that_cannot_be_augmented(photos):
    with pytest.raises(ValueError, match=r"shape \(n, channels, height, width\), but \(3, 8, 8\) came"):
        neighbors_of(photos[0], weak())
    with pytest.raises(ValueError, match="images of 3 channels, but 1 came"):
        neighbors_of(photos[:, :1], moderate(0.1))
    with pytest.raises(ValueError, match="values from 0 to 1, but values from -0"):
        neighbors_of(photos - 0.5, moderate(0.1))
    neighbors_of(photos[:, :1] - 0.5, weak())
    for wrong in (lambda: moderate(-0.1), lambda: weak(padding=-1), lambda: weak(padding=0.5)):
        with pytest.raises(ValueError, match="must be a"):
            wrong()


# Behind a linear head


@pytest.mark.parametrize("width", [4, 12, 40], ids=["k > d", "k = d", "k < d"])
def test_noise_behind_a_head_has_its_covariance(width):
    weight = torch.randn(12, width, generator=seeded(), dtype=torch.float64)
    z = ThroughLinear(weight).draw(torch.zeros(2, 12, dtype=torch.float64), 50_000, seeded())
    for row in range(2):
        covariance = z[:, row].T @ z[:, row] / len(z)
        expected = weight @ weight.T
        scale = torch.sqrt(expected.diag()[:, None] * expected.diag())
        assert ((covariance - expected).abs() / scale).max() < 6 * (2 / len(z)) ** 0.5
    assert ThroughLinear(weight).root.shape == (min(12, width), 12)


def test_votes_behind_a_head_are_those_in_front_of_it():
    """Shares of the same law: their differences have the size of sampling errors, no more and no less."""
    generator = seeded(3)
    weight, bias = torch.randn(5, 20, generator=generator), torch.randn(5, generator=generator)
    features = 0.5 * torch.randn(300, 20, generator=generator)
    head = torch.nn.Linear(20, 5)
    head.weight.data, head.bias.data = weight, bias
    how = {"strength": 0.7, "num_samples": 2000}
    in_front = estimate(features, neighbors=Additive(Gaussian()), head=head, **how)
    behind = estimate(features @ weight.T + bias, neighbors=ThroughLinear(weight), seed=1, **how)
    mean = (in_front + behind) / 2
    common = mean * (1 - mean) > 0.02
    error = ((in_front - behind) / torch.sqrt(2 * mean * (1 - mean) / 2000))[common]
    assert len(error) > 500
    assert 0.85 < error.square().mean() < 1.15
    # Independent noise at the logits is another law.
    other = estimate(
        features @ weight.T + bias, neighbors=Additive(Gaussian()), strength=0.7 * 20**0.5, num_samples=2000
    )
    assert ((other - behind)[common] ** 2 / (2 * mean * (1 - mean) / 2000)[common]).mean() > 2


def test_both_find_the_same_strength():
    generator = seeded(5)
    weight = torch.randn(4, 30, generator=generator) / 2
    features = torch.randn(600, 30, generator=generator)
    logits = features @ weight.T
    labels = torch.multinomial(torch.softmax(logits / 2, 1), 1, generator=generator)[:, 0]
    strengths = [0.1 * 1.5**i for i in range(10)]
    how = {"num_samples": 400, "strengths": strengths, "criterion": "brier"}
    in_front = poise.SampledConsistency(Additive(Gaussian()), lambda f: f @ weight.T, **how).fit(features, labels)
    behind = poise.SampledConsistency(ThroughLinear(weight), **how).fit(logits, labels)
    assert strengths[0] < behind.strength_ < strengths[-1]
    assert in_front.strength_ == behind.strength_


def test_a_head_must_be_a_matrix():
    with pytest.raises(ValueError, match=r"the \(k, d\) tensor of a linear head, but shape \(3,\) came"):
        ThroughLinear(torch.ones(3))
    with pytest.raises(ValueError, match=r"\(n, 3\) logits, but inputs of shape \(\d+, 8\) came"):
        estimate(torch.ones(5, 8), neighbors=ThroughLinear(torch.ones(3, 8)), strength=1.0)


# Any transform


def test_a_transform_with_or_without_a_strength(photos):
    import kornia.augmentation as aug

    class Shift(torch.nn.Module):
        def forward(self, images, strength, *, more=0):
            return images + strength * torch.rand(len(images), 1, 1, 1)

    pipeline = aug.AugmentationSequential(aug.RandomHorizontalFlip(), aug.RandomCrop((SIZE, SIZE), padding=1))
    with_strength = {Augmented(lambda x, s: x * s), Augmented(Shift())}
    without = {Augmented(pipeline), Augmented(lambda x: x), Augmented(lambda x, s=2: x), Augmented(torch.relu)}
    assert all(one.has_strength for one in with_strength)
    assert not any(one.has_strength for one in without)
    state = torch.get_rng_state()
    found, _ = neighbors_of(photos, Augmented(pipeline), 20)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, neighbors_of(photos, Augmented(pipeline), 20)[0])
    # kornia's crop and flip are among those of the slow loop.
    padded = torch.nn.functional.pad(photos[0], (1, 1, 1, 1))
    crops = [padded[:, y : y + SIZE, x : x + SIZE] for y in range(3) for x in range(3)]
    possible = torch.stack(crops + [crop.flip(-1) for crop in crops])
    distance = (found[:, 0, None] - possible).abs().amax((2, 3, 4)).amin(1)
    assert distance.max() < 1e-5


def test_transforms_of_torchvision(photos):
    """Drawn once for a batch, and again for each neighbor."""
    v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=ImportError)
    transform = Augmented(v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(brightness=0.5)]))
    assert not transform.has_strength
    found, _ = neighbors_of(photos, transform, 20)
    assert found.shape == (20, *photos.shape)
    assert torch.equal(found, neighbors_of(photos, transform, 20)[0])
    sums = found.sum((1, 2, 3, 4)) / photos.sum()
    assert 0.5 <= sums.min() < 0.9
    assert len(sums.unique()) == 20


# At the calibrator


def test_a_fit_without_a_strength_has_nothing_to_choose(tmp_path):
    images = torch.rand(150, 3, SIZE, SIZE, generator=seeded())
    labels = torch.randint(0, 3, (150,), generator=seeded(1))
    calls = []

    def head(x):
        calls.append(len(x))
        return 20 * (x[..., : SIZE // 2].mean((2, 3)) - 0.5)

    calibrator = poise.SampledConsistency(weak(), head, num_samples=16).fit(images, labels)
    assert sum(calls) == 1, "one row tells the number of classes"
    assert calibrator.strength_ == 1
    probs = calibrator.predict_proba(images)
    assert 0.05 < (1 - probs.amax(1)).mean() < 0.6
    calibrator.set_params(head=None)
    poise.save(calibrator, tmp_path / "weak.safetensors")
    loaded = poise.load(tmp_path / "weak.safetensors").set_params(head=head)
    assert loaded.neighbors == TrainAugmentation()
    assert torch.equal(loaded.predict_proba(images), probs)


def test_of_several_kinds_the_better_one_is_kept():
    """One that flips what the network looks at against one that does not, and one with a strength."""
    images = torch.rand(300, 3, SIZE, SIZE, generator=seeded())

    def head(x):
        return 20 * x[..., : SIZE // 2].mean((2, 3))

    labels = torch.multinomial(torch.softmax(head(images) / 8, 1), 1, generator=seeded(1))[:, 0]
    kinds = (weak(padding=0, flip=False), weak(padding=0), moderate(padding=0, flip=False))
    fitted = poise.SampledConsistency(kinds, head, num_samples=16, strengths=[0.01, 0.2]).fit(images, labels)
    values = {one["neighbors"]: one["ece"] for one in fitted.candidates_}
    assert fitted.neighbors_ == min(values, key=values.get)
    assert values[kinds[1]] < values[kinds[0]], "without flips nothing moves: every vote is one"
    assert [one["strength"] for one in fitted.candidates_][:2] == [1.0, 1.0]


def test_strengths_may_be_given():
    logits = 4 * torch.randn(400, 4, generator=seeded())
    labels = torch.multinomial(torch.softmax(logits / 2, 1), 1, generator=seeded(1))[:, 0]
    few = poise.SampledConsistency(num_samples=100, strengths=[0.1, 1.0, 3.0, 1e6]).fit(logits, labels)
    assert few.strength_ == 3.0, "the last leaves no accuracy, the first ones no doubt"
    assert poise.SampledConsistency(num_samples=10, strengths=[2.0]).fit(logits, labels).strength_ == 2.0
    with pytest.raises(ValueError, match="strengths must be a finite number, 0 or above, but is -1"):
        poise.SampledConsistency(strengths=[1.0, -1.0]).fit(logits, labels)
