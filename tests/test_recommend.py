"""The recommendation: what is plainly right is found, nothing is made of noise, and the clock is kept."""

from __future__ import annotations

import re
import time

import pytest
import torch

import poise
from poise.calibrators.base import CALIBRATORS, Calibrator
from poise.compare import default_methods, race
from poise.compare.race import stratified_folds


@pytest.fixture(autouse=True)
def registry():
    before = dict(CALIBRATORS)
    yield
    CALIBRATORS.clear()
    CALIBRATORS.update(before)


def sample(temperature, n=1500, k=4, seed=0, bias=None):
    """Logits that are too large by a temperature, and lack a bias."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(n, k, generator=generator, dtype=torch.float64) * 2.5
    shifted = true if bias is None else true + bias
    return true * temperature, torch.multinomial(shifted.softmax(1), 1, generator=generator)[:, 0]


QUICK = ["ETS", "SVS", "SMS", "VS", "CTS", "PTS"]


@pytest.mark.parametrize("seed", range(5))
def test_temperature_scaling_where_a_temperature_is_all_that_is_wrong(seed):
    found = poise.recommend(sample(2.0, seed=seed), QUICK)
    assert found.method == "TemperatureScaling"
    assert type(found.calibrator) is poise.TemperatureScaling
    assert found.calibrator.temperature_ == pytest.approx(2.0, rel=0.1)
    lowest = found.candidates[0]
    said = "which may be chance" if lowest.method != found.method else "has the lowest"
    assert said in found.reason


def test_what_is_plainly_better_is_found_and_fitted_on_all_rows():
    val = sample(2.0, bias=torch.tensor([0.0, 0.0, 1.5, -1.5]))
    found = poise.recommend(val, QUICK)
    assert "Vector" in found.method
    own = type(found.calibrator)().fit(*val)
    assert torch.equal(found.calibrator.predict_proba(val[0]), own.predict_proba(val[0]))
    assert "beyond noise. It may change predictions; the best that changes none is" in found.reason
    assert len(re.findall(r"\.(?:\s|$)", found.reason)) == 2
    chosen = found.candidates[0]
    assert chosen.method == found.method
    assert chosen.gain > 3 * chosen.standard_error
    assert chosen.num_folds == 5


def test_the_figures_are_those_of_the_folds():
    logits, labels = val = sample(2.0, bias=torch.tensor([0.0, 0.0, 1.0, -1.0]))
    found = poise.recommend(val, ["SVS"], num_folds=3)
    folds = stratified_folds(labels, 3)
    losses = {}
    for kind in (poise.TemperatureScaling, poise.StructuredVectorScaling):
        losses[kind.__name__] = loss = torch.zeros(len(labels), dtype=torch.float64)
        for fold in range(3):
            rest = folds != fold
            probs = kind().fit(logits[rest], labels[rest]).predict_proba(logits[~rest])
            loss[~rest] = -probs.gather(1, labels[~rest, None])[:, 0].log()
    by_name = {candidate.method: candidate for candidate in found.candidates}
    for name, loss in losses.items():
        gain = losses["TemperatureScaling"] - loss
        assert by_name[name].nll == pytest.approx(float(loss.mean()))
        assert by_name[name].gain == pytest.approx(float(gain.mean()))
        assert by_name[name].standard_error == pytest.approx(float(gain.std()) / len(labels) ** 0.5)


def test_all_that_are_registered_take_part():
    found = poise.recommend(sample(2.0, n=150, k=3), budget=3)
    assert {candidate.method for candidate in found.candidates} == set(default_methods(with_features=False))


def test_folds_are_even_in_size_and_in_every_class():
    labels = torch.randint(5, (103,), generator=torch.Generator().manual_seed(0))
    folds = stratified_folds(labels, 4)
    assert folds.bincount().max() - folds.bincount().min() <= 1
    for k in range(5):
        counts = folds[labels == k].bincount(minlength=4)
        assert counts.max() - counts.min() <= 1
    assert torch.equal(folds, stratified_folds(labels, 4))
    assert not torch.equal(folds, stratified_folds(labels, 4, seed=1))


def slow(seconds: float, improvement: float = 0.0) -> Calibrator:
    """Knows the temperature, and takes its time."""

    class Slow(Calibrator):
        def _fit(self, logits, labels, weight, features):
            time.sleep(seconds)
            self.fitted_ = True

        def _log_prob(self, logits, features):
            return torch.log_softmax(logits / 2 + improvement, 1)

    return Slow()


def test_the_budget_is_kept_and_what_it_left_out_is_said():
    start = time.perf_counter()
    found = poise.recommend(sample(2.0), {"quick": poise.StructuredVectorScaling(), "slow": slow(1.0)}, budget=3.0)
    assert time.perf_counter() - start < 5.0
    by_name = {candidate.method: candidate for candidate in found.candidates}
    assert by_name["quick"].num_folds == 5
    assert by_name["slow"].nll is None or by_name["slow"].num_folds < 5
    found = poise.recommend(sample(2.0), {"slow": slow(0.7)}, budget=1.0)
    assert "more than the budget had left" in found.candidates[-1].reason
    assert "(1 left out)" in found.reason
    assert found.seconds < 2.5


def test_what_is_judged_on_some_folds_is_compared_on_those(monkeypatch):
    """A clock that stands still but for the fits of one method, each a second."""
    now = [0.0]
    monkeypatch.setattr(race.time, "perf_counter", lambda: now[0])
    ticking = slow(0.0)
    fit = type(ticking)._fit

    def counted(self, *data):
        now[0] += 1.0
        fit(self, *data)

    monkeypatch.setattr(type(ticking), "_fit", counted)
    val = sample(2.0, n=700)
    found = poise.recommend(val, {"ticking": ticking}, budget=7.1)
    one = next(candidate for candidate in found.candidates if candidate.method == "ticking")
    # A second for 140 rows; then folds of a second each, while there is time for one and the 1.25 s of the last fit.
    assert one.num_folds == 4
    assert one.seconds == 5
    temperature = next(candidate for candidate in found.candidates if candidate.method == "TemperatureScaling")
    assert one.nll == pytest.approx(temperature.nll - one.gain)


def test_a_method_that_fails_is_left_out_with_its_reason():
    class Broken(Calibrator):
        def _fit(self, logits, labels, weight, features):
            raise RuntimeError("no fuel")

        def _log_prob(self, logits, features):
            return logits

    class Needy(poise.TemperatureScaling):
        needs_features = True

    found = poise.recommend(sample(2.0, n=200), {"broken": Broken(), "needy": Needy()})
    reasons = {candidate.method: candidate.reason for candidate in found.candidates}
    assert reasons["broken"] == "it failed: no fuel"
    assert reasons["needy"].startswith("it failed: Needy needs the network's features")


def test_the_hopeless_are_given_up_after_a_fold():
    class Sure(Calibrator):
        def _fit(self, logits, labels, weight, features):
            self.fitted_ = True

        def _log_prob(self, logits, features):
            return torch.log_softmax(100 * logits, 1)

    found = poise.recommend(sample(2.0), {"sure": Sure()})
    sure = found.candidates[-1]
    assert (sure.nll, sure.num_folds) == (None, 1)
    assert re.fullmatch(r"on the first fold it was [\d.]+ ± [\d.]+ behind Temperature", sure.reason)


def test_the_same_input_gives_the_same():
    found = [poise.recommend(sample(2.0, n=300), ["SVS", "PTS"]) for _ in range(2)]
    figures = [[(c.method, c.nll, c.gain, c.standard_error) for c in each.candidates] for each in found]
    assert figures[0] == figures[1]
    assert found[0].reason == found[1].reason


def test_few_rows_and_names():
    names = ["ant", "bee", "cat"]
    val = poise.Scores([[2.0, 1, 0], [0, 2, 1], [1, 0, 3], [3, 0, 0]] * 2, labels=[names[k] for k in (0, 1, 2, 1)] * 2)
    found = poise.recommend(val, ["SVS"])
    assert found.calibrator.classes_.tolist() == names
    assert found.num_folds == 5


def test_an_interrupt_is_one():
    def impatient(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        poise.recommend(sample(2.0, n=200), ["SVS"], progress=impatient)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda val: poise.recommend(val, budget=0), "budget must be a finite number above 0"),
        (lambda val: poise.recommend(val, num_folds=1), "num_folds must be a whole number, 2 or more"),
        (lambda val: poise.recommend(val, "vectr"), "did you mean 'Vector'"),
        (lambda val: poise.recommend((val[0], 0 * val[1])), "only one class"),
        (lambda val: poise.recommend((val[0][:0], val[1][:0])), "val has 0 rows"),
    ],
)
def test_refuses(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(sample(2.0, n=50))
