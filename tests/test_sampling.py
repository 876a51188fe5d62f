"""The equation by random draws: keyed draws, bounded memory, any head, readout and neighbour, and the exact limit."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch

import poise
from poise.link import Link
from poise.neighbors import Additive, Augmented
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, Laplace, LogGamma, Logistic, Uniform
from poise.progress import Bar
from poise.readout import soft, vote
from poise.sampling import estimate, estimate_each

NOISES = [Gaussian(), Uniform(), Gumbel(), Logistic(), Laplace(), GeneralizedNormal(8.0), LogGamma(0.25)]
GAUSSIAN = Additive(Gaussian())


def moved(x, strength):
    return x + strength * torch.rand_like(x)


def logits(num_samples=150, num_classes=4, seed=0):
    return torch.randn(num_samples, num_classes, generator=torch.Generator().manual_seed(seed)) * 2


# Draws keyed by (seed, row, draw)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 128, 149])
@pytest.mark.parametrize("shape", [(4,), (3, 5)], ids=["flat", "image"])
@pytest.mark.parametrize(
    "neighbors", [GAUSSIAN, Additive(LogGamma(0.25)), Augmented(lambda x, s: x + s * torch.randn(4))]
)
def test_a_longer_table_begins_with_the_same_rows(neighbors, shape, num_rows):
    if isinstance(neighbors, Augmented) and shape != (4,):
        neighbors = Augmented(lambda x, s: x + s * torch.randn(x.shape))
    x = torch.randn(150, *shape, generator=torch.Generator().manual_seed(0))
    how = {"neighbors": neighbors, "strength": 1.5, "num_samples": 50, "head": lambda x: x.flatten(1)[:, :4]}
    assert torch.equal(estimate(x[:num_rows], **how), estimate(x, **how)[:num_rows])


@pytest.mark.parametrize("num_classes", [2, 10, 700])
@pytest.mark.parametrize("fewer", [1, 4, 500, 999])
def test_fewer_draws_are_the_first_of_more(num_classes, fewer):
    """Counts only grow, and by no more than the number of new draws; whatever a tile holds."""
    z = logits(70, num_classes)
    how = {"neighbors": GAUSSIAN, "strength": 2.0}
    few = estimate(z, num_samples=fewer, **how) * fewer
    many = estimate(z, num_samples=1000, **how) * 1000
    grown = (many - few).round()
    torch.testing.assert_close(few, few.round(), rtol=0, atol=1e-3)
    assert (grown >= 0).all()
    assert torch.equal(grown.sum(1), torch.full((70,), 1000.0 - fewer))
    if fewer == 999:
        assert torch.equal(grown.amax(1), torch.ones(70))


def test_rows_and_draws_and_seeds_are_different():
    z = torch.zeros(130, 5)
    how = {"neighbors": GAUSSIAN, "strength": 1.0, "num_samples": 400}
    probs = estimate(z, **how)
    assert len(probs.unique(dim=0)) > 125, "equal rows are perturbed by draws of their own"
    assert not torch.equal(probs, estimate(z, seed=1, **how))
    assert torch.equal(probs, estimate(z, seed=0, **how))
    # Chi-square of 130 · 4 degrees of freedom: between rows, tiles and draws there is nothing but chance.
    chi_square = ((probs * 400 - 80) ** 2 / 80).sum()
    assert abs(chi_square - 520) < 5 * (2 * 520) ** 0.5
    votes = estimate(z, num_samples=1, neighbors=GAUSSIAN, strength=1.0)
    assert (votes.sum(0) > 10).all(), "one draw is one vote, for any class"


@pytest.mark.parametrize(
    "neighbors", [*map(Additive, NOISES), Augmented(moved)], ids=lambda one: repr(getattr(one, "noise", "augmented"))
)
def test_the_draws_are_the_same_at_every_strength(neighbors):
    """Several strengths at once, or each by itself: not a bit of difference."""
    z, strengths = logits(), [0.0, 0.1, 1.0, 30.0]
    how = {"neighbors": neighbors, "num_samples": 60}
    each = estimate_each(z, strengths=strengths, **how)
    assert each.shape == (4, 150, 4)
    for probs, strength in zip(each, strengths, strict=True):
        assert torch.equal(probs, estimate(z, strength=strength, **how))
    assert torch.equal(each[0], vote(z))
    # x and its strength scaled together: the same draws, the same votes.
    if isinstance(neighbors, Additive):
        assert torch.equal(estimate(z * 4, strength=4.0, **how), each[2])


def test_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for neighbors in (GAUSSIAN, Augmented(lambda x, s: x + s * torch.randn_like(x))):
        first = estimate(logits(), neighbors=neighbors, strength=1.0, num_samples=20)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(77)
        assert torch.equal(first, estimate(logits(), neighbors=neighbors, strength=1.0, num_samples=20))
        torch.manual_seed(3)


# What comes out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("readout", [vote, soft])
def test_rows_sum_to_one_in_any_precision(dtype, readout):
    """Halves cannot count to a thousand: they are counted in float32."""
    probs = estimate(logits().to(dtype), neighbors=GAUSSIAN, strength=2.0, readout=readout, num_samples=1000)
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    atol = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-6 if readout is vote else 4e-3)
    torch.testing.assert_close(probs.sum(1), torch.ones(150, dtype=probs.dtype), rtol=0, atol=atol)
    assert ((probs >= 0) & (probs <= 1 + atol)).all()
    if readout is vote:
        torch.testing.assert_close(probs * 1000, (probs * 1000).round(), rtol=0, atol=1e-3)


def test_probabilities_do_not_pass_through_a_logarithm():
    """A share of votes stays k/T to the last digit, for the edges of bins are such shares."""
    calibrator = poise.SampledConsistency(num_samples=1000)
    calibrator.fit(logits(300), torch.distributions.Categorical(logits=logits(300) / 2).sample())
    probs = calibrator.predict_proba(logits(300))
    assert torch.equal(probs, (probs * 1000).round() / 1000)


@pytest.mark.parametrize("noise", NOISES, ids=repr)
@pytest.mark.parametrize("num_classes", [2, 7])
def test_the_limit_is_the_exact_link(noise, num_classes):
    """Within five standard errors everywhere, and of the right size: the squared errors average to one."""
    z, num_samples = logits(400, num_classes).double(), 4_000
    sampled = estimate(z, neighbors=Additive(noise), strength=1.7, num_samples=num_samples)
    exact = Link(noise).log_prob(z / 1.7).exp()
    # Rare classes are not normal, but Poisson.
    error = (sampled - exact) / torch.sqrt(exact * (1 - exact) / num_samples).clamp(min=1e-300)
    common = exact * (1 - exact) > 10 / num_samples
    assert common.sum() > 400
    assert error[common].abs().max() < 5
    assert 0.65 < (error[common] ** 2).mean() < 1.35
    assert ((sampled - exact)[~common].abs() < 30 / num_samples).all()


def test_gumbel_votes_are_a_softmax():
    z = logits(40).double()
    sampled = estimate(z, neighbors=Additive(Gumbel()), strength=2.5, num_samples=20_000)
    expected = torch.softmax(z / 2.5, 1)
    assert ((sampled - expected).abs() < 5 * torch.sqrt(expected * (1 - expected) / 20_000) + 5e-4).all()


def test_the_soft_readout():
    """The mean softmax of two classes under uniform noise of both has an integral to compare with."""
    z = torch.tensor([[0.0, 0.0], [1.0, -1.0], [4.0, 0.0]], dtype=torch.float64)
    sampled = estimate(z, neighbors=Additive(Uniform()), strength=3.0, readout=soft, num_samples=20_000)
    u = torch.linspace(-3, 3, 2001, dtype=torch.float64)
    gap = (u[:, None] - u).flatten()
    expected = torch.stack([torch.sigmoid(d + gap).mean() for d in z[:, 0] - z[:, 1]])
    torch.testing.assert_close(sampled[:, 0], expected, rtol=0, atol=5 * 0.35 / 20_000**0.5)
    hard = estimate(z, neighbors=Additive(Uniform()), strength=3.0, num_samples=20_000)
    assert (hard[1:, 0] > sampled[1:, 0] + 0.02).all()


# Heads


def test_a_linear_head_is_noise_in_the_features():
    """Against the definition, written out with the same draws."""
    weight, bias = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0.5, 0.0, -0.5])
    features, strength = logits(64, 6), 0.8
    neighbors = Additive(Laplace())
    sampled = estimate(
        features, neighbors=neighbors, strength=strength, head=lambda f: f @ weight + bias, num_samples=300
    )

    class Recorded(Additive):
        def place(self, inputs, z, strength):
            seen.append(z)
            return super().place(inputs, z, strength)

    seen = []
    estimate(features, neighbors=Recorded(Laplace()), strength=strength, head=lambda f: f @ weight, num_samples=300)
    z = torch.cat(seen)
    assert z.shape == (300, 64, 6)
    votes = ((features + strength * z) @ weight + bias).argmax(-1)
    expected = torch.nn.functional.one_hot(votes, 3).float().mean(0)
    torch.testing.assert_close(sampled, expected, rtol=0, atol=1.5 / 300)
    assert (sampled == expected).float().mean() > 0.99


def test_a_gaussian_head_has_a_closed_form():
    """Gaussian noise in the features is correlated noise in the logits: two classes, a probit."""
    weight = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features = logits(64, 6).double()
    sampled = estimate(features, neighbors=GAUSSIAN, strength=1.3, head=lambda f: f @ weight, num_samples=10_000)
    direction = weight[:, 0] - weight[:, 1]
    expected = torch.special.ndtr(features @ direction / (1.3 * direction.norm()))
    assert ((sampled[:, 0] - expected).abs() < 5 * torch.sqrt(expected * (1 - expected) / 10_000) + 1e-3).all()


def test_a_head_sees_batches_of_inputs_as_they_are():
    """Images stay images; the head is called without gradients, on no more than a tile of rows and draws."""
    shapes = []
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    def head(images):
        shapes.append(tuple(images.shape))
        assert not torch.is_grad_enabled()
        return network(images)

    images = torch.randn(70, 3, 8, 8, requires_grad=True)
    probs = estimate(images, neighbors=GAUSSIAN, strength=0.1, head=head, num_samples=32)
    assert probs.shape == (70, 4)
    assert not probs.requires_grad
    assert all(shape[1:] == (3, 8, 8) for shape in shapes)
    assert sum(shape[0] for shape in shapes) == 70 * 32
    assert estimate(images[:0], neighbors=GAUSSIAN, strength=0.1, head=head).shape == (0, 4)
    # A head whose result is not contiguous.
    transposed = estimate(
        images, neighbors=GAUSSIAN, strength=0.1, head=lambda x: network(x).T.contiguous().T, num_samples=32
    )
    assert torch.equal(transposed, probs)


def test_augmented_images():
    """A transform that draws from torch's generator: repeatable, the same flips at every strength."""

    def shift(images, strength):
        moved = torch.roll(images, int(torch.randint(0, 1 + int(strength), ())), dims=-1)
        return moved if torch.rand(()) < 0.5 else moved.flip(-1)

    images = torch.arange(8.0).expand(5, 1, 8, 8)

    def head(x):
        return torch.stack([x[:, 0, 0, 0], torch.full((len(x),), 3.5)], dim=1)

    def run(**more):
        return estimate(images, neighbors=Augmented(shift), head=head, num_samples=200, **{"strength": 0.0} | more)

    assert torch.equal(run(), run())
    assert not torch.equal(run(), run(seed=5))
    share = run()[:, 0]
    assert ((share - 0.5).abs() < 5 * 0.5 / 200**0.5).all(), "half of them are flipped, so that pixel 7 comes first"
    assert ((run(strength=7.0)[:, 0] - 0.5).abs() < 0.2).all()


# Batches, progress and interruptions


@pytest.mark.parametrize("batch_size", [1, 17, 64, 500, 10_000])
@pytest.mark.parametrize("num_rows", [3, 70])
def test_the_batch_size_changes_no_draw(num_rows, batch_size):
    """The head never sees more at once, and for few rows it sees many draws at once."""
    sizes = []

    def head(images):
        sizes.append(len(images))
        return images.flatten(1)[:, :4]

    images = logits(num_rows, 4 * 32 * 32).reshape(num_rows, 4, 32, 32)
    how = {"neighbors": GAUSSIAN, "strength": 1.0, "head": head, "num_samples": 40}
    expected = estimate(images, **how)
    sizes.clear()
    assert torch.equal(estimate(images, batch_size=batch_size, **how), expected)
    assert sum(sizes) == num_rows * 40
    assert max(sizes) <= batch_size
    assert max(sizes) >= min(batch_size, num_rows * 40) / 2 or num_rows == 70


def test_few_rows_fill_a_batch_with_draws():
    sizes = []
    images = logits(1, 3 * 32 * 32)

    def head(x):
        sizes.append(len(x))
        return x[:, :4]

    estimate(images, neighbors=GAUSSIAN, strength=1.0, head=head, num_samples=99)
    assert max(sizes) == 64


def test_progress_arrives_at_the_end():
    for how in ({}, {"head": lambda x: x, "batch_size": 50}):
        seen = []
        estimate_each(
            logits(130),
            neighbors=GAUSSIAN,
            strengths=[1.0, 2.0],
            num_samples=30,
            progress=lambda done, total: seen.append((done, total)),  # noqa: B023
            **how,
        )
        assert seen[-1] == (130 * 30 * 2, 130 * 30 * 2)
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", ["dictionary", "folder"])
def test_an_interrupted_run_goes_on(kind, tmp_path):
    """What was finished is not computed again, and the result is that of a run in one go."""
    calls = []

    def head(x):
        calls.append(len(x))
        return 2 * x

    def stop(done, total):
        if done > 200 * 20 * 2 / 2:
            raise Interrupted

    how = {"neighbors": GAUSSIAN, "strengths": [0.5, 1.0], "head": head, "num_samples": 20}
    expected = estimate_each(logits(200), **how)
    in_one_go = sum(calls)
    store = {} if kind == "dictionary" else poise.io.Folder(tmp_path / "parts")
    with pytest.raises(Interrupted):
        estimate_each(logits(200), store=store, progress=stop, **how)
    assert len(store) == 1
    if kind == "folder":
        store = poise.io.Folder(tmp_path / "parts")
    calls.clear()
    seen = []
    resumed = estimate_each(logits(200), store=store, progress=lambda *at: seen.append(at), **how)
    assert torch.equal(resumed, expected)
    # 64 of 200 rows are there already; to know that, one draw of the first tile is made again.
    assert sum(calls) == in_one_go - 64 * 20 * 2 + 64 * 2
    assert seen[-1][0] == seen[-1][1]
    calls.clear()
    assert torch.equal(estimate_each(logits(200), store=store, **how), expected)
    assert sum(calls) == 64 * 2


@pytest.mark.parametrize(
    "changed",
    [
        {"strengths": [0.5, 1.1]},
        {"seed": 1},
        {"num_samples": 21},
        {"readout": soft},
        {"neighbors": Additive(Uniform())},
        {"head": lambda x: 2.1 * x.roll(1, -1)},
        {"inputs": logits(200, seed=3)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_has_changed_is_computed_again(changed):
    how = {"inputs": logits(200), "neighbors": GAUSSIAN, "strengths": [0.5, 1.0], "head": None, "num_samples": 20}
    store = {}
    estimate_each(store=store, **how)
    assert len(store) == 4
    assert torch.equal(estimate_each(store=store, **how | changed), estimate_each(**how | changed))
    assert len(store) == 8


def test_a_fit_goes_on(tmp_path):
    """An interrupted search repeats no part that was finished."""
    z = logits(300)
    labels = torch.distributions.Categorical(logits=z / 2).sample()
    parts = tmp_path / "fit"
    calls = []

    def head(x):
        calls.append(len(x))
        if len(calls) == 60:
            raise Interrupted
        return x

    how = {"num_samples": 50, "strengths": [0.5, 1.0, 2.0, 4.0], "store": poise.io.Folder(parts), "batch_size": 500}
    with pytest.raises(Interrupted):
        poise.SampledConsistency(head=head, **how).fit(z, labels)
    resumed = poise.SampledConsistency(head=head, **how).fit(z, labels)
    assert len(calls) < 60 + 300 * 50 * 5 / 500
    how["store"] = None
    whole = poise.SampledConsistency(head=lambda x: x, **how).fit(z, labels)
    assert resumed.strength_ == whole.strength_
    assert resumed.candidates_ == whole.candidates_


def test_a_folder_of_tensors(tmp_path):
    folder = poise.io.Folder(tmp_path / "a" / "b")
    assert list(folder) == []
    assert "x" not in folder
    folder["x"] = torch.arange(3)
    folder["y"] = torch.ones(2, 2, dtype=torch.float64).T
    assert sorted(folder) == ["x", "y"]
    assert torch.equal(poise.io.Folder(str(tmp_path / "a" / "b"))["x"], torch.arange(3))
    del folder["x"]
    assert list(folder) == ["y"]
    for wrong in (folder.__getitem__, folder.__delitem__):
        with pytest.raises(KeyError):
            wrong("x")
    (tmp_path / "a" / "b" / "y.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="cannot be read as a kept part"):
        folder["y"]


def test_the_bar(monkeypatch):
    """A line that is written over, only for who looks, and not at every step."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    bar = Bar("neighbors")
    bar(1, 10)
    assert stream.getvalue() == ""
    stream.isatty = lambda: True
    for done in range(1, 1001):
        bar(done, 1000)
    shown = stream.getvalue()
    assert shown.endswith("left\n")
    assert "100 %   1,000 of 1,000 neighbors" in shown
    assert 1 < shown.count("\r") < 20


def test_augmentations_leave_every_generator_alone():
    """That of the CPU, and of a device that is not asked for."""
    state = torch.get_rng_state()
    estimate(logits(), neighbors=Augmented(moved), strength=1.0, num_samples=3)
    assert torch.equal(torch.get_rng_state(), state)


# Memory

PEAK = """
import resource, sys, torch
torch.set_num_threads(1)
from poise.neighbors import Additive
from poise.noise import Gaussian
from poise.sampling import estimate_each
z = torch.zeros(2_000, 100)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
how = dict(neighbors=Additive(Gaussian()), strengths=[1.0, 2.0])
estimate_each(z[:64], num_samples=20, **how)
start = peak()
estimate_each(z, num_samples=int(sys.argv[1]), **how)
print(peak() - start)
"""


def test_memory_does_not_grow_with_the_draws():
    """n · k · T numbers would be 480 MB here; a tile and the results are a few."""
    few, many = (
        float(subprocess.run([sys.executable, "-c", PEAK, str(t)], capture_output=True, text=True, check=True).stdout)
        for t in (20, 600)
    )
    assert few < 40
    assert many < few + 15


PEAK_OF_IMAGES = """
import sys, torch
torch.set_num_threads(1)
from poise.neighbors import weak
from poise.sampling import estimate
images = torch.zeros(70, 3, 96, 96)
head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 96 * 96, 10))
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
how = dict(neighbors=weak(), strength=1.0, head=head, batch_size=int(sys.argv[2]))
estimate(images[:64], num_samples=2, **how)
# What was needed for the imports is forgotten.
open("/proc/self/clear_refs", "w").write("5")
start = peak()
estimate(images, num_samples=int(sys.argv[1]), **how)
print(peak() - start)
"""


PEAK_OF_MANY = """
import sys, torch
torch.set_num_threads(1)
import poise
from poise.neighbors import weak
images, labels = torch.rand(10_000, 3, 8, 8), torch.arange(10_000) % 10
head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
num_images, num_samples = int(sys.argv[1]), int(sys.argv[2])
calibrator = poise.SampledConsistency(weak(), head, num_samples=num_samples, batch_size=256)
calibrator.fit(images[:64], labels[:64]).predict_proba(images[:64])
open("/proc/self/clear_refs", "w").write("5")
start = peak()
assert len(calibrator.predict_proba(images[:num_images])) == num_images
print(peak() - start)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is told by Linux alone.")
def test_memory_of_ten_thousand_images_and_a_hundred_draws():
    """All neighbours would be 770 MB, their logits 40; it takes what a hundredth of the work takes."""
    many, few = (
        float(
            subprocess.run(
                [sys.executable, "-c", PEAK_OF_MANY, *map(str, sizes)], capture_output=True, text=True, check=True
            ).stdout
        )
        for sizes in ((10_000, 100), (1_000, 10))
    )
    assert many < 20
    assert many < few + 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is told by Linux alone.")
def test_memory_of_images_is_bounded_by_the_batch():
    """Of 70 images and 100 draws all neighbours would be 770 MB; a batch of 40 is four."""
    small, large = (
        float(
            subprocess.run(
                [sys.executable, "-c", PEAK_OF_IMAGES, "100", str(size)], capture_output=True, text=True, check=True
            ).stdout
        )
        for size in (40, 5000)
    )
    assert small < 60
    assert large > small + 100, "else the batch size would bound nothing"
