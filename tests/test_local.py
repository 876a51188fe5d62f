"""The certainty of one prediction: shares that are known beforehand, their errors, and answers that are words."""

from __future__ import annotations

import math

import pytest
import torch

import poise
from poise.local import Answers
from poise.neighbors import Additive, moderate, weak
from poise.noise import Gaussian


class LeftOrRight(torch.nn.Module):
    """Which half is brighter: a flip changes its mind, a dropout in training mode would too."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.9)

    def forward(self, images):
        left, right = images[..., :4].mean((1, 2, 3)), images[..., 4:].mean((1, 2, 3))
        return self.drop(torch.stack([left, right, torch.full_like(left, -1.0)], dim=1))


@pytest.fixture(scope="module")
def images():
    left = torch.zeros(3, 8, 8)
    left[..., :4] = 1
    both = torch.ones(3, 8, 8)
    both[..., 4:] = 0.99
    return torch.stack([left, both, torch.flip(left, [-1])])


def test_shares_that_are_known(images):
    """Half of the neighbours are flipped; a crop by one pixel changes nothing, unless the halves are alike."""
    found = poise.local_uncertainty(LeftOrRight(), images, num_samples=900)
    assert found.predicted.tolist() == [0, 0, 1]
    error = (0.25 / 900) ** 0.5
    assert ((found.confidence - 0.5).abs() < 4.5 * error).all()
    assert torch.equal(found.consistency[:, 2], torch.zeros(3))
    assert found.runner_up.tolist() == [1, 1, 0]
    torch.testing.assert_close(found.entropy, torch.full((3,), math.log(2)), rtol=0, atol=0.02)
    torch.testing.assert_close(found.standard_error[:, :2], torch.full((3, 2), error), rtol=0.01, atol=0)
    torch.testing.assert_close(found.samples_for(0.01).double(), torch.full((3,), 2500.0).double(), rtol=0.01, atol=0)
    steady = poise.local_uncertainty(LeftOrRight(), images[[0, 2]], weak(flip=False), num_samples=100)
    assert torch.equal(steady.confidence, torch.ones(2))
    assert torch.equal(steady.entropy, torch.zeros(2))
    assert not torch.signbit(steady.entropy).any()
    assert (steady.standard_error > 0).all(), "a hundred that agree are not a proof"
    assert (steady.samples_for(0.001) > 100).all()
    assert "class 0: 100.0% ± 1.0% of 100 neighbors agree" in str(steady)


def test_standard_errors_are_right():
    """Over many seeds the shares scatter as they say."""
    logits = torch.tensor([[1.0, 0.5, 0.0], [2.0, 0.0, -3.0]])
    runs = [
        poise.local_uncertainty(lambda z: z, logits, Additive(Gaussian()), 200, strength=1.0, seed=seed)
        for seed in range(60)
    ]
    spread = torch.stack([run.confidence for run in runs]).std(0)
    claimed = runs[0].standard_error.gather(1, runs[0].predicted[:, None])[:, 0]
    torch.testing.assert_close(spread, claimed, rtol=0.3, atol=0)


def test_it_is_repeatable_and_leaves_the_network_alone(images):
    model = LeftOrRight()
    first = poise.local_uncertainty(model, images, num_samples=50)
    assert model.training
    again = poise.local_uncertainty(model.eval(), images.numpy(), num_samples=50, batch_size=7)
    assert torch.equal(first.consistency, again.consistency)
    assert not torch.equal(
        first.consistency, poise.local_uncertainty(model, images, num_samples=50, seed=1).consistency
    )
    seen = []
    poise.local_uncertainty(model, images, num_samples=50, progress=lambda *at: seen.append(at))
    assert seen[-1] == (150, 150)


def test_wrong_use_is_refused(images):
    model = LeftOrRight()
    with pytest.raises(ValueError, match="has a strength, but none came"):
        poise.local_uncertainty(model, images, moderate())
    with pytest.raises(TypeError, match=r"such as weak\(\), but 0.1 came"):
        poise.local_uncertainty(model, images, 0.1)
    with pytest.raises(ValueError, match="num_samples"):
        poise.local_uncertainty(model, images, num_samples=0)
    with pytest.raises(ValueError, match="images must be finite"):
        poise.local_uncertainty(model, images * torch.nan)
    with pytest.raises(ValueError, match="error must be a finite number above 0"):
        poise.local_uncertainty(model, images, num_samples=5).samples_for(0.0)


# Answers alone


def test_answers_are_counted():
    found = poise.consistency(["no", "yes", "yes", "maybe", "yes"])
    assert found == Answers(("yes", "no", "maybe"), (0.6, 0.2, 0.2), 5)
    assert (found.answer, found.confidence, found.runner_up) == ("yes", 0.6, "no")
    assert math.isclose(found.entropy, -(0.6 * math.log(0.6) + 0.4 * math.log(0.2)))
    assert math.isclose(found.standard_error, math.sqrt(4 / 7 * 3 / 7 / 5))


def test_answers_that_mean_the_same():
    def same(a, b):
        return a.lower().rstrip(".") == b.lower().rstrip(".")

    found = poise.consistency(["4", "Four", "four.", "four.", "five"], same)
    assert found.answers == ("four.", "4", "five")
    assert found.shares == (0.6, 0.2, 0.2)
    # An equivalence that needs no hash: rounded numbers, and answers that are lists.
    assert poise.consistency([0.5, 0.51, 2.0], lambda a, b: abs(a - b) < 0.1).shares == (2 / 3, 1 / 3)
    assert poise.consistency([["a"], ["b"], ["a"]]).answer == ["a"]


def test_all_agree():
    found = poise.consistency(torch.tensor([3, 3, 3]))
    assert (found.answer, found.confidence, found.entropy, found.runner_up) == (3, 1.0, 0.0, None)
    assert found.standard_error > 0.1


def test_answers_to_nothing_are_refused():
    with pytest.raises(ValueError, match="no answers came"):
        poise.consistency([])
    with pytest.raises(TypeError, match="but one string came: 'yes'; pass a list"):
        poise.consistency("yes")


def test_answers_and_networks_agree():
    """The same votes, counted here and there."""
    logits = torch.tensor([[1.0, 0.6, 0.2]])
    z = Additive(Gaussian())
    votes = poise.sampling.estimate(logits, neighbors=z, strength=1.0, num_samples=64)[0] * 64
    words = [name for name, count in zip("abc", votes.long().tolist(), strict=True) for _ in range(count)]
    found = poise.consistency(words)
    local = poise.local_uncertainty(lambda x: x, logits, z, 64, strength=1.0)
    assert sorted(found.shares) == sorted(local.consistency[0].tolist())
    assert math.isclose(found.entropy, float(local.entropy[0]), rel_tol=1e-6)
