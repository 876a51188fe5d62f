"""scikit-learn's own checks of an estimator, and its pipelines, searches and displays around a calibrator."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin, clone, is_classifier
from sklearn.calibration import CalibrationDisplay
from sklearn.datasets import load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.svm import LinearSVC
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

import poise
from poise.noise import Gaussian, Gumbel, LogGamma

COLUMNS = "the check's data have two columns and other labels than 0 and 1; columns of logits are the classes"
NAMES = "the check calls fit(X=..., y=...); the arguments are called logits and labels, which is what they are"
EXPECTED_FAILURES = {
    "check_fit_score_takes_y": NAMES,
    "check_sample_weight_equivalence_on_dense_data": NAMES,
    "check_classifier_data_not_an_array": COLUMNS,
    "check_classifiers_classes": COLUMNS,
    "check_classifiers_train": COLUMNS,
    "check_estimators_fit_returns_self": COLUMNS,
    "check_estimators_overwrite_params": COLUMNS,
    "check_fit2d_1feature": COLUMNS,
    "check_readonly_memmap_input": COLUMNS,
    "check_sample_weights_not_an_array": COLUMNS,
    "check_sample_weights_not_overwritten": COLUMNS,
    "check_sample_weights_pandas_series": COLUMNS,
    "check_sample_weights_shape": COLUMNS,
    "check_supervised_y_2d": "a column of labels is as clear as a row of them: no DataConversionWarning",
}
KEYED = "draws are keyed by the row, so that a longer table begins with the same ones"
SAMPLED_FAILURES = EXPECTED_FAILURES | {
    "check_methods_sample_order_invariance": KEYED,
    "check_methods_subset_invariance": KEYED,
    "check_parameters_default_constructible": "the default neighbors are a frozen dataclass: a value, like a number",
}
ESTIMATORS = {
    poise.TemperatureScaling(): EXPECTED_FAILURES,
    poise.ConsistencyCalibration(noise=Gaussian()): EXPECTED_FAILURES,
    poise.HistogramBinning(): EXPECTED_FAILURES,
    poise.IsotonicCalibration(): EXPECTED_FAILURES,
    poise.GroupCalibration(num_partitions=2): EXPECTED_FAILURES,
    poise.IntraOrderPreserving(hidden=(4,)): EXPECTED_FAILURES,
    poise.SampledConsistency(num_samples=20): SAMPLED_FAILURES,
}


# The checks fit on noise and on constants, where the best strength is rightly infinite.
@pytest.mark.filterwarnings("ignore::poise.BoundWarning")
@parametrize_with_checks(list(ESTIMATORS), expected_failed_checks=lambda estimator: ESTIMATORS[estimator])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


class OnLogits(ClassifierMixin, BaseEstimator):
    """A linear classifier with a calibrator behind it, so that any number of columns becomes logits of the classes."""

    def __init__(self, calibrator=None):
        self.calibrator = calibrator

    def fit(self, X, y, sample_weight=None):
        self.classifier_ = LogisticRegression().fit(X, y, sample_weight=sample_weight)
        scores = self.classifier_.decision_function(X)
        self.calibrator_ = clone(self.calibrator)
        self.calibrator_.fit(scores, y, classes=self.classifier_.classes_, sample_weight=sample_weight)
        self.classes_, self.n_features_in_ = self.calibrator_.classes_, self.classifier_.n_features_in_
        return self

    def predict_proba(self, X):
        return self.calibrator_.predict_proba(self.classifier_.decision_function(X))

    def predict(self, X):
        return self.calibrator_.predict(self.classifier_.decision_function(X))


BEHIND_A_CLASSIFIER = [
    (calibrator, name)
    for calibrator in ESTIMATORS
    for name, reason in EXPECTED_FAILURES.items()
    if reason in (COLUMNS, NAMES)
    # Draws belong to rows: repeated rows are perturbed differently.
    and not (isinstance(calibrator, poise.SampledConsistency) and "equivalence" in name)
]


@pytest.mark.filterwarnings("ignore::poise.BoundWarning")
@pytest.mark.parametrize(("calibrator", "name"), BEHIND_A_CLASSIFIER)
def test_scikit_learn_checks_behind_a_classifier(calibrator, name):
    """What `EXPECTED_FAILURES` excuses by the shape of the data holds where the data have the right shape."""
    checks = [
        check
        for _, check in estimator_checks_generator(OnLogits(calibrator), legacy=True)
        if getattr(check, "func", check).__name__ == name
    ]
    assert checks
    for check in checks:
        check(OnLogits(clone(calibrator)))


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    names = np.array([f"digit {d}" for d in range(10)])
    return train_test_split(X / 16, names[y], test_size=0.6, random_state=0)


@pytest.fixture(scope="module")
def classifier(digits):
    return LinearSVC(C=0.02, random_state=0).fit(digits[0], digits[2])


def test_a_pipeline_of_network_and_calibrator(digits, classifier):
    """Raw features in, honest probabilities and class names out; the network inside stays as it was."""
    _, X, _, y = digits
    logits_of = FunctionTransformer(classifier.decision_function)
    pipeline = make_pipeline(logits_of, poise.ConsistencyCalibration())
    coefficients = classifier.coef_.copy()
    pipeline.fit(X[:500], y[:500])
    probs = pipeline.predict_proba(X[500:])
    assert type(probs) is np.ndarray
    assert list(pipeline.classes_) == list(classifier.classes_)
    np.testing.assert_array_equal(pipeline.predict(X[500:]), classifier.predict(X[500:]))
    assert pipeline.score(X[500:], y[500:]) == classifier.score(X[500:], y[500:]) > 0.9
    raw = np.exp(classifier.decision_function(X[500:]))
    assert log_loss(y[500:], probs, labels=pipeline.classes_) < 0.5 * log_loss(y[500:], raw / raw.sum(1, keepdims=True))
    np.testing.assert_array_equal(classifier.coef_, coefficients)


def test_a_search_over_criterion_and_noise(digits, classifier):
    _, X, _, y = digits
    scores = classifier.decision_function(X)
    grid = {"criterion": ["nll", "brier"], "noise": [Gumbel(), LogGamma(0.25), Gaussian()]}
    search = GridSearchCV(poise.ConsistencyCalibration(), grid, scoring="neg_log_loss", cv=2, error_score="raise")
    scores, y = scores[:600], y[:600]
    search.fit(scores, y)
    results = search.cv_results_["mean_test_score"]
    assert np.isfinite(results).all()
    assert search.best_score_ == results.max() > results.min()
    assert search.best_params_["noise"] in grid["noise"]
    assert log_loss(y, search.predict_proba(scores)) < 0.5
    twice = GridSearchCV(poise.TemperatureScaling(), {"criterion": ["nll", "ece"]}, scoring="neg_log_loss", cv=3)
    assert np.isfinite(twice.fit(scores, y).best_score_)


def test_cross_validation_and_a_frozen_calibrator(digits, classifier):
    _, X, _, y = digits
    scores = classifier.decision_function(X)
    calibrator = poise.TemperatureScaling()
    np.testing.assert_allclose(cross_val_score(calibrator, scores, y, cv=3).mean(), classifier.score(X, y), atol=1e-4)
    probs = cross_val_predict(calibrator, scores, y, cv=3, method="predict_proba")
    np.testing.assert_allclose(probs.sum(1), 1)
    calibrator.fit(scores[:300], y[:300])
    frozen = FrozenEstimator(calibrator)
    temperature = calibrator.temperature_
    frozen.fit(scores[300:], y[300:])
    assert calibrator.temperature_ == temperature
    np.testing.assert_array_equal(frozen.predict_proba(scores), calibrator.predict_proba(scores))


def test_a_calibration_display_of_two_classes(digits):
    """A margin of either sign per row is understood as the log-odds, and the curve comes nearer to the diagonal."""
    X_train, X, y_train, y = digits
    late = np.isin(y, ["digit 1", "digit 7", "digit 8", "digit 9"])
    classifier = LinearSVC(C=0.01, random_state=0).fit(
        X_train, np.isin(y_train, ["digit 1", "digit 7", "digit 8", "digit 9"])
    )
    margins = classifier.decision_function(X)
    assert margins.ndim == 1
    calibrator = poise.ConsistencyCalibration().fit(margins[:500], late[:500])
    display = CalibrationDisplay.from_estimator(calibrator, margins[500:, None], late[500:], n_bins=5)
    raw = CalibrationDisplay.from_predictions(late[500:], 1 / (1 + np.exp(-margins[500:])), n_bins=5)

    def distance(shown):
        return np.abs(shown.prob_true - shown.prob_pred).mean()

    assert distance(display) < distance(raw)
    assert calibrator.score(margins[500:], late[500:]) == classifier.score(X[500:], late[500:])


def test_tags_say_what_it_is():
    for estimator in ESTIMATORS:
        assert is_classifier(estimator)
        assert get_tags(estimator).target_tags.required
        assert not get_tags(estimator).input_tags.sparse
