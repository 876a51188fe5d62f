"""Bad input is refused with one sentence: what was expected, what came, what to do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy import sparse

import poise
from poise import _check
from poise.noise import Gaussian

LABELS = np.arange(12) % 3
LOGITS = np.random.default_rng(0).normal(size=(12, 3)) + np.eye(3)[LABELS]
PROBS = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
CALIBRATORS = {
    "temperature": poise.TemperatureScaling,
    "consistency": lambda: poise.ConsistencyCalibration(Gaussian(), lapse=False),
    "sampled": lambda: poise.SampledConsistency(num_samples=10),
}
each = pytest.mark.parametrize("make", CALIBRATORS.values(), ids=CALIBRATORS)


def holding(value, row=7):
    array = LOGITS.copy()
    array[row, 1] = value
    return array


BAD_LOGITS = {
    "nan": (holding(np.nan), "logits must be finite, but row 7 holds NaN; find out"),
    "infinity": (holding(np.inf), "logits must be finite, but row 7 holds infinity; find out"),
    "minus infinity": (torch.tensor(holding(-np.inf)), "logits must be finite, but row 7 holds infinity"),
    "both infinities": (np.vstack([holding(np.inf), holding(-np.inf)]), "row 7 holds infinity"),
    "nan in halves": (torch.tensor(holding(np.nan)).half(), "row 7 holds NaN"),
    "three axes": (LOGITS[None], r"shape \(n, k\), but have 3 dimensions, shape \(1, 12, 3\); flatten"),
    "a number": (3.5, r"shape \(n, k\), but have 0 dimensions"),
    "no columns": (LOGITS[:, :0], r"logits must have a column per class, but came with 0 feature\(s\)"),
    "probabilities": (PROBS, r"sums to one, so these look like probabilities; pass their logarithms"),
    "one-hot": (np.eye(3)[LABELS], "look like probabilities"),
    "complex": (LOGITS.astype(complex), r"must be real numbers, but complex ones came .*; pass integers or floats"),
    "complex tensor": (torch.tensor(LOGITS).to(torch.complex64), "must be real numbers, but complex ones came; pass"),
    "words": (np.array([["a", "b", "c"]] * 12), "logits must be real numbers, but <U1 came; pass integers or floats"),
    "words in a list": ([["a", "b", "c"]] * 12, "must be real numbers, but"),
    "dates": (np.zeros((12, 3), "datetime64[s]"), r"must be real numbers, but datetime64\[s\] came"),
    "objects": (np.array([[{}, 1, 2]] * 12, dtype=object), "logits must be numbers, but .*; pass integers or floats"),
    "sparse": (sparse.csr_array(LOGITS), r"must be a dense array, but a sparse one came; pass logits.toarray\(\)"),
    "nothing": (None, r"shape \(n, k\), but have 0 dimensions"),
}


@pytest.mark.parametrize(("logits", "message"), BAD_LOGITS.values(), ids=BAD_LOGITS)
@each
def test_bad_logits(make, logits, message):
    fitted = make().fit(LOGITS, LABELS)
    labels = np.arange(len(logits) if isinstance(logits, (np.ndarray, torch.Tensor, list)) else 12) % 3
    for call in (
        lambda: make().fit(logits, labels),
        lambda: fitted.predict_proba(logits),
        lambda: fitted.predict_log_proba(logits),
        lambda: fitted.predict(logits),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


BAD_LABELS = {
    "too large": (np.where(LABELS == 2, 3, LABELS), "between 0 and 2 for 3 columns of scores, but a label 3 came"),
    "negative": (LABELS - 1, "between 0 and 2 for 3 columns of scores, but a label -1 came; labels count"),
    "fractions": (LABELS + 0.5, "must be whole numbers, but some are fractions, NaN or infinity"),
    "nan": (np.where(LABELS == 2, np.nan, LABELS), "must be whole numbers, but some are fractions, NaN or infinity"),
    "complex": (LABELS.astype(complex), "must be whole numbers, but complex ones came"),
    "too few": (LABELS[:-1], "there are 12 rows of scores but 11 labels; pass one label for every row"),
    "too many": (torch.arange(13) % 3, "there are 12 rows of scores but 13 labels"),
    "one-hot": (np.eye(3, dtype=int)[LABELS], r"shape \(12,\), but have shape \(12, 3\); .* labels.argmax\(1\)"),
    "a number": (1, r"shape \(12,\), but have shape \(\)"),
    "one class": (np.ones(12, int), "all 12 labels are 1, only one class; pass a validation set that holds"),
    "two words of three": (np.array(["cat", "dog"])[LABELS % 2], "2 different names .* 3 columns of scores.*classes="),
    "too few words": (np.array(["a", "b", "c"])[LABELS][:-1], "12 rows of scores but 11 labels"),
    "none": (None, r"labels must be one whole number or name per row, but none came; pass fit\(logits, labels\)"),
}


@pytest.mark.parametrize(("labels", "message"), BAD_LABELS.values(), ids=BAD_LABELS)
@each
def test_bad_labels(make, labels, message):
    calibrator = make()
    with pytest.raises(ValueError, match=message):
        calibrator.fit(LOGITS, labels)
    assert not [name for name in vars(calibrator) if name.endswith("_")], "refused before anything is learned"


WORDS = np.array(["cat", "dog", "emu"])
BAD_CLASSES = {
    "unknown word": (np.where(LABELS == 1, "dgo", WORDS[LABELS]), WORDS, "label 'dgo' is not among.*mean 'dog'"),
    "unknown number": (LABELS + 10, [10, 11, 13], "a label 12 is not among the classes"),
    "too few": (LABELS, ["cat", "dog"], "name each of the 3 columns once, but 2 names came; pass one name"),
    "a word": (LABELS, "cat", "name each of the 3 columns once, but 1 names came"),
    "twice": (LABELS, ["cat", "dog", "cat"], "must differ from each other, but some name occurs twice"),
}


@pytest.mark.parametrize(("labels", "classes", "message"), BAD_CLASSES.values(), ids=BAD_CLASSES)
def test_bad_classes(labels, classes, message):
    with pytest.raises(ValueError, match=message):
        poise.TemperatureScaling().fit(LOGITS, labels, classes=classes)


BAD_WEIGHTS = {
    "negative": (-np.ones(12), "sample_weight must be finite and nonnegative, but some weights are not"),
    "nan": (np.full(12, np.nan), "must be finite and nonnegative"),
    "infinite": (torch.full((12,), torch.inf), "must be finite and nonnegative"),
    "zero": (np.zeros(12), "must have a positive sum, but every weight is zero"),
    "too few": (np.ones(11), r"one number per row, shape \(12,\), but has shape \(11,\)"),
    "a column": (np.ones((12, 1)), r"one number per row, shape \(12,\), but has shape \(12, 1\)"),
    "words": (np.array(["much"] * 12), "sample_weight must be real numbers, but <U4 came"),
    "one class left": ((LABELS == 1) * 1.0, "all 4 labels are 1, only one class"),
}


@pytest.mark.parametrize(("weight", "message"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
@each
def test_bad_weights(make, weight, message):
    with pytest.raises(ValueError, match=message):
        make().fit(LOGITS, LABELS, sample_weight=weight)


@each
def test_too_little_to_fit_on(make):
    with pytest.raises(ValueError, match=r"nothing to fit on: 0 samples came; pass the validation logits and labels"):
        make().fit(LOGITS[:0], LABELS[:0])
    with pytest.raises(ValueError, match=r"all 1 labels are 0, only one class"):
        make().fit(LOGITS[:1], LABELS[:1])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 2), "logits have 2 column.* fitted with 3: X has 2 features, .* expecting 3 features"),
        ((5, 4), "logits have 4 column.* fitted with 3"),
        ((5, 1), "logits have 1 column.* fitted with 3"),
        ((3,), r"logits have 1 column.* fitted with 3.*; .* a single row as logits\[None\]"),
    ],
)
@each
def test_other_columns_than_fitted_with(make, shape, message):
    with pytest.raises(ValueError, match=message):
        make().fit(LOGITS, LABELS).predict_proba(np.ones(shape))


FEATURES = {
    "too few": (np.ones((11, 2)), "features have 11 rows but 12 were expected; pass one for every sample"),
    "nan": (np.full((12, 2), np.nan), "features must be finite, but row 0 holds NaN"),
    "a number": (1.0, "features must have one entry per sample along the first axis, but a single number came"),
}


@pytest.mark.parametrize(("features", "message"), FEATURES.values(), ids=FEATURES)
def test_bad_features(features, message):
    with pytest.raises(ValueError, match=message):
        poise.TemperatureScaling().fit(LOGITS, LABELS, features=features)
    with pytest.raises(ValueError, match=message):
        poise.TemperatureScaling().fit(LOGITS, LABELS).predict_proba(LOGITS, features=features)


def no_logits(inputs):
    return inputs.sum(1)


BAD_PARAMETERS = {
    "criterion": (poise.TemperatureScaling("nnl"), "criterion must be one of 'nll', .* but is 'nnl'; did you mean"),
    "ece of what": (poise.ConsistencyCalibration(criterion="mce"), "criterion must be one of .*, but is 'mce'"),
    "noise": (poise.ConsistencyCalibration("autto"), "noise .* must be one of 'auto', but is 'autto'; did you mean 'a"),
    "noise class": (poise.ConsistencyCalibration(Gaussian), "noise .* but is <class 'poise.noise.Gaussian'>"),
    "scaling": (poise.ConsistencyCalibration(scaling="non"), "scaling must be one of 'none'.* but is 'non'"),
    "readout": (poise.SampledConsistency(readout="votes"), "readout .* but is 'votes'; did you mean 'vote'"),
    "draws": (poise.SampledConsistency(num_samples=0), "num_samples must be a whole number, 1 or more, but is 0"),
    "half a draw": (poise.SampledConsistency(num_samples=1.5), "num_samples must be a whole number, .* but is 1.5"),
    "seed": (poise.SampledConsistency(seed=-1), "seed must be a whole number, 0 or more, but is -1"),
    "neighbors": (
        poise.SampledConsistency(Gaussian()),
        r"such as Additive\(Gaussian\(\)\), but Gaussian\(\) came; pass",
    ),
    "a word": (poise.SampledConsistency("gaussian"), "neighbors must be one or several objects such as"),
    "no neighbors": (poise.SampledConsistency(()), "neighbors must be one or several objects .* but none came"),
    "head": (poise.SampledConsistency(head=no_logits), r"head must turn 1 input\(s\) into a \(1, k\) tensor of logits"),
}


@pytest.mark.parametrize(("calibrator", "message"), BAD_PARAMETERS.values(), ids=BAD_PARAMETERS)
def test_bad_parameters(calibrator, message):
    """Judged at fit, as scikit-learn does, so that a search may set them."""
    with pytest.raises((ValueError, TypeError), match=message):
        calibrator.fit(LOGITS, LABELS)


HEADED = poise.SampledConsistency(head=torch.nn.Linear(5, 3).double().requires_grad_(False), num_samples=10)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.full((12, 5), np.nan), "inputs must be finite, but row 0 holds NaN"),
        (np.array(["a"] * 12), "inputs must be real numbers"),
        (1.0, "inputs must have one entry per sample"),
    ],
)
def test_bad_inputs_of_a_head(inputs, message):
    with pytest.raises(ValueError, match=message):
        HEADED.fit(inputs, LABELS)


BAD_PROBS = {
    "logits": (
        LOGITS,
        r"must lie between 0 and 1, but came with values from .*; if these are logits, pass torch.softmax",
    ),
    "percent": (PROBS * 100, "must sum to 1, but all sum to about 100, so these look like percentages; divide them by"),
    "no sum": (PROBS * 0.9, r"each row of probs must sum to 1, but row \d+ sums to 0.9; if these are logits"),
    "nan": (holding(np.nan), "probs must be finite, but row 7 holds NaN"),
}


@pytest.mark.parametrize(("probs", "message"), BAD_PROBS.values(), ids=BAD_PROBS)
def test_bad_probs(probs, message):
    with pytest.raises(ValueError, match=message):
        _check.probs(probs)


@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [
        (np.array([0.5, 0.5, np.nan]), [1, 0, 1], "confidence must be finite, but row 2 holds NaN"),
        (np.array([50.0, 99.0]), [1, 0], "between 0 and 1, but .* from 50 to 99; divide percentages by 100"),
        (PROBS, LABELS, r"one number per row .* shape \(12, 3\); .* probs.max\(1\)"),
        (np.array([0.5, 0.5]), [1], r"one entry per confidence, shape \(2,\), but has shape \(1,\)"),
        (np.array([0.5, 0.5]), [1, 2], "true or false .* pass predicted == labels"),
    ],
)
def test_bad_confidences(confidence, correct, message):
    with pytest.raises(ValueError, match=message):
        _check.confidences(confidence, correct)


@pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf, True, "1", None])
def test_a_positive_number(value):
    with pytest.raises(ValueError, match=r"shape must be a finite number above 0, but is "):
        _check.positive(value, "shape")


@pytest.mark.parametrize("value", [1, 2.5, np.float32(0.5), np.int64(3), np.float64(1e-300)])
def test_numbers_of_any_kind_are_numbers(value):
    assert _check.positive(value, "shape") == value
    assert type(_check.nonnegative(value, "shape")) is float


def test_what_is_not_refused():
    """Input that is only unusual: huge and equal scores, whole floats, two log-odds, nonnegative scores."""
    huge = np.full((12, 3), 3e38, dtype=np.float32)
    assert _check.logits(huge).shape == (12, 3), "the sum overflows, no entry does"
    assert _check.labels(LABELS.astype(float), num_samples=12, num_classes=3).dtype == torch.int64
    assert _check.logits([0.25, 0.75]).tolist() == [[0, 0.25], [0, 0.75]]
    assert _check.logits([[0.25, 0.75]]).shape == (1, 2), "one row that sums to one may well be logits"
    assert _check.logits(np.abs(LOGITS)).shape == (12, 3)


@pytest.mark.parametrize("case", [*BAD_LOGITS, *BAD_LABELS, *BAD_WEIGHTS, *BAD_PARAMETERS])
def test_an_error_is_one_sentence_that_says_what_to_do(case):
    """Expected, what came and what to do, parted by a comma and a semicolon, ended by a full stop."""
    arguments = {"logits": LOGITS, "labels": LABELS}
    calibrator = poise.TemperatureScaling()
    for table, name in ((BAD_LOGITS, "logits"), (BAD_LABELS, "labels"), (BAD_WEIGHTS, "sample_weight")):
        if case in table:
            arguments[name] = table[case][0]
            break
    else:
        calibrator = BAD_PARAMETERS[case][0]
    with pytest.raises((ValueError, TypeError)) as error:
        calibrator.fit(**arguments)
    text = str(error.value)
    assert text[0].islower() or text.startswith("Temp"), text
    assert text.endswith((".", "?")), text
    # Words that scikit-learn's checks look for may follow as a second sentence.
    assert len(re.findall(r"[a-z)]\. [A-Z]", text)) <= 1, text
    # Of a parameter, what was expected is what to do.
    assert ";" in text or case in BAD_PARAMETERS, text
    assert "\n" not in text
