"""Scores and calibrators survive a file unchanged, bad files are refused in words, and writing is all or nothing."""

from __future__ import annotations

import csv
import doctest
import importlib
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.torch import load_file, save_file
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

import poise
from poise.calibrators.base import CALIBRATORS
from poise.io import Scores, atomic, load, read_scores, save, write_scores
from poise.io.state import FORMAT
from poise.neighbors import Additive, Augmented
from poise.noise import Gaussian, GeneralizedNormal, LogGamma, Uniform

SUFFIXES = [".npz", ".logits.npy", ".pt", ".safetensors", ".csv", ".parquet"]
WITH_FEATURES = SUFFIXES[:4]


def small(n: int = 5, k: int = 3, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, k, generator=generator).to(dtype)
    return {"logits": logits, "labels": torch.arange(n) % k}


def file_in(folder: Path, suffix: str, kind: str = "logits") -> Path:
    return folder / f"val{suffix.replace('logits', kind)}"


def tree(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def untouched(tmp_path):
    """Nothing in the folder has changed when the test is over."""
    (tmp_path / "val.npz").write_bytes(b"old")
    before = tree(tmp_path)
    yield tmp_path
    assert tree(tmp_path) == before


def write_half(path, error):
    with atomic(path) as temporary:
        temporary.write_text("half")
        raise error


# ---------------------------------------------------------------------------------------------------------- atomic


def test_atomic_replaces_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".txt"
    assert tree(tmp_path) == {"a.txt": b"new"}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error):
        write_half(path, error)
    assert tree(tmp_path) == {"a.txt": b"old"}


def test_an_interrupted_first_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "a.txt", KeyboardInterrupt)
    assert tree(tmp_path) == {}


def test_atomic_keeps_permissions_and_links(tmp_path):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    with atomic(link) as temporary:
        temporary.write_text("new")
        temporary.chmod(0o600)
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640


def test_atomic_needs_a_folder_and_a_file_name(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"there is no folder .*missing; make it first"),
        atomic(tmp_path / "missing" / "a.txt"),
    ):
        pass
    with pytest.raises(IsADirectoryError, match=r"is a folder; name a file in it"), atomic(tmp_path):
        pass
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_have_the_rights_that_open_gives(tmp_path, suffix):
    write_scores(file_in(tmp_path, suffix), **small())
    (tmp_path / "plain").touch()
    assert file_in(tmp_path, suffix).stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_interrupted_scores_leave_the_old_ones(tmp_path, monkeypatch, suffix, error):
    path = file_in(tmp_path, suffix)
    write_scores(path, **small())
    before = tree(tmp_path)

    def interrupted(*args, **kwargs):
        raise error

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(error):
        write_scores(path, **small(7))
    assert tree(tmp_path) == before


def test_an_interrupted_csv_row_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "val.csv"
    write_scores(path, **small())
    before = tree(tmp_path)

    class Writer:
        def __init__(self, lines, **_):
            self.lines, self.rows = lines, 0

        def writerow(self, row):
            self.lines.write("half a row")
            self.rows += 1
            if self.rows == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(csv, "writer", Writer)
    with pytest.raises(KeyboardInterrupt):
        write_scores(path, **small(7))
    assert tree(tmp_path) == before


# ---------------------------------------------------------------------------------------------------------- scores


def test_scores_are_checked_and_kept_as_they_came():
    half = torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=torch.bfloat16, requires_grad=True)
    scores = Scores(
        logits=half, labels=np.array([1.0, 0.0]), classes=["a", "b"], features=np.ones((2, 3, 4), np.float16)
    )
    assert scores.logits.dtype == torch.bfloat16
    assert not scores.logits.requires_grad
    assert scores.labels.dtype == torch.int64
    assert scores.features.dtype == torch.float16
    assert (scores.num_samples, scores.num_classes, scores.classes) == (2, 2, ("a", "b"))
    assert scores.as_logits() is scores.logits


def test_one_log_odds_becomes_two_columns():
    assert Scores(logits=[1.0, -2.0]).logits.tolist() == [[0, 1], [0, -2]]
    assert Scores(probs=[0.25]).probs.tolist() == [[0.75, 0.25]]


def test_labels_that_are_names():
    scores = Scores(logits=np.eye(3) * 4, labels=["cat", "ant", "bee"])
    assert scores.classes == ("ant", "bee", "cat")
    assert scores.labels.tolist() == [2, 0, 1]
    assert Scores(logits=np.eye(2) * 4, labels=["b", "b"], classes=["b", "a"]).labels.tolist() == [0, 0]


def test_probs_as_logits_are_finite_and_give_the_probs_back():
    for dtype in (torch.float32, torch.float64):
        probs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=dtype)
        logits = Scores(probs=probs).as_logits()
        assert logits.dtype == dtype
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits.softmax(1), probs)
        assert logits[1, 1] == pytest.approx(math.log(torch.finfo(dtype).tiny))


def test_small_probs_in_half_precision_are_not_floored():
    probs = torch.tensor([[1.0, 2.0**-20]], dtype=torch.float16)
    assert Scores(probs=probs).as_logits()[0, 1].item() == pytest.approx(-20 * math.log(2))


BAD_SCORES = [
    ({}, "either logits or probs were expected, but neither came"),
    ({"logits": [[1.0, 2.0]], "probs": [[0.5, 0.5]]}, "but both came"),
    ({"logits": [[1.0, math.nan]]}, "logits must be finite, but row 0 holds NaN"),
    ({"logits": [[1.0, math.inf]]}, "row 0 holds infinity"),
    ({"logits": np.ones((2, 2, 2))}, "shape \\(2, 2, 2\\)"),
    ({"logits": [[0.5, 0.5], [0.1, 0.9]]}, "these look like probabilities"),
    ({"probs": [[2.0, 3.0]]}, "probs must lie between 0 and 1"),
    ({"logits": [[1.0, 2.0]], "labels": [0, 1]}, "1 rows of scores but 2 labels"),
    ({"logits": [[1.0, 2.0]], "labels": [2]}, "labels must lie between 0 and 1"),
    ({"logits": [[1.0, 2.0]], "labels": [0.5]}, "labels must be whole numbers"),
    ({"logits": [[1.0, 2.0]], "features": np.ones((2, 3))}, "features have 2 rows but 1 were expected"),
    ({"logits": [[1.0, 2.0]], "features": [[math.nan]]}, "features must be finite"),
    ({"logits": [[1.0, 2.0]], "classes": ["a"]}, "classes must name each of the 2 columns"),
    ({"logits": [[1.0, 2.0]], "classes": ["a", "a"]}, "some name occurs twice"),
    ({"logits": [[1.0, 2.0]], "classes": ["a", " "]}, "names without line breaks, but one is ' '"),
    ({"logits": [[1.0, 2.0]], "classes": ["a", "b\nc"]}, "one is 'b\\\\nc'"),
    ({"logits": [[1.0, 2.0]], "classes": ["a", "bee"], "labels": ["be"]}, "did you mean 'bee'"),
]


@pytest.mark.parametrize(("parts", "match"), BAD_SCORES)
def test_bad_scores_are_refused_and_never_written(untouched, parts, match):
    with pytest.raises(ValueError, match=match):
        Scores(**parts)
    for suffix in SUFFIXES:
        with pytest.raises(ValueError, match=match):
            write_scores(file_in(untouched, suffix), **parts)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("classes", [None, ["cat", 'a, "dog"', "größe 3"]])
@pytest.mark.parametrize("with_labels", [True, False])
def test_round_trip(tmp_path, suffix, kind, classes, with_labels):
    parts = small()
    if kind == "probs":
        parts["probs"] = parts.pop("logits").softmax(1)
    if not with_labels:
        del parts["labels"]
    path = file_in(tmp_path, suffix, kind)
    write_scores(path, **parts, classes=classes)
    scores = read_scores(path, need_labels=with_labels)
    found = getattr(scores, kind)
    assert torch.equal(found.float(), parts[kind])
    assert found.dtype == (torch.float64 if suffix == ".csv" else torch.float32)
    assert getattr(scores, "probs" if kind == "logits" else "logits") is None
    assert (scores.labels is None) != with_labels
    if with_labels:
        assert torch.equal(scores.labels, parts["labels"])
    assert scores.classes == (None if classes is None else tuple(classes))
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]
    write_scores(path, **vars(scores))
    again = read_scores(path, need_labels=with_labels)
    assert torch.equal(getattr(again, kind), found)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffixes_may_be_capitals(tmp_path, suffix):
    path = tmp_path / f"VAL{suffix.replace('.npy', '.NPY') if 'npy' in suffix else suffix.upper()}"
    write_scores(path, **small())
    assert torch.equal(read_scores(path).logits.float(), small()["logits"])
    assert {file.suffix for file in tmp_path.iterdir()} == {path.suffix}


@pytest.mark.parametrize("suffix", WITH_FEATURES)
def test_features_round_trip(tmp_path, suffix):
    features = torch.arange(30, dtype=torch.float64).reshape(5, 2, 3).transpose(1, 2)
    path = file_in(tmp_path, suffix)
    write_scores(path, **small(), features=features)
    assert torch.equal(read_scores(path).features, features)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_has_no_room_for_features(untouched, suffix):
    with pytest.raises(ValueError, match=r"no room for features"):
        write_scores(file_in(untouched, suffix), **small(), features=torch.ones(5, 2))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_lose_nothing(tmp_path, suffix, dtype):
    parts = small(dtype=dtype)
    path = file_in(tmp_path, suffix)
    write_scores(path, **parts)
    found = read_scores(path).logits
    assert torch.equal(found.double(), parts["logits"].double())
    if suffix in (".pt", ".safetensors") or (dtype != torch.bfloat16 and suffix != ".csv"):
        assert found.dtype == dtype


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_empty_scores_round_trip(tmp_path, suffix):
    path = file_in(tmp_path, suffix)
    write_scores(path, logits=torch.zeros(0, 3), labels=torch.zeros(0))
    scores = read_scores(path)
    assert (scores.num_samples, scores.num_classes) == (0, 3)


names = st.lists(
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff"), min_size=1, max_size=8)
    .map(str.strip)
    .filter(lambda name: name and name.lower() not in ("label", "labels", "target", "targets")),
    min_size=2,
    max_size=4,
    unique=True,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), suffix=st.sampled_from(SUFFIXES), classes=names, dtype=st.sampled_from(["float32", "float64"]))
def test_any_scores_survive_any_format(data, suffix, classes, dtype):
    shape = (data.draw(st.integers(2, 4)), len(classes))
    width = 32 if dtype == "float32" else 64
    # The first column keeps the rows from being taken for probabilities, which is refused.
    elements = st.floats(-(2.0**100), 2.0**100, width=width)
    logits = data.draw(npst.arrays(dtype, shape, elements=elements)).copy()
    logits[:, 0] = -np.abs(logits[:, 0]) - 1
    labels = data.draw(st.lists(st.integers(0, len(classes) - 1), min_size=shape[0], max_size=shape[0]))
    with tempfile.TemporaryDirectory() as folder:
        path = file_in(Path(folder), suffix)
        write_scores(path, logits=logits, labels=labels, classes=classes)
        scores = read_scores(path)
    assert scores.logits.numpy().astype(dtype).tobytes() == logits.tobytes()
    assert scores.labels.tolist() == labels
    default = tuple(map(str, range(len(classes))))
    assert (scores.classes or default) == tuple(classes)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_labels_are_named(tmp_path, suffix):
    path = file_in(tmp_path, suffix)
    write_scores(path, logits=small()["logits"])
    place = {".csv": "column `label`", ".parquet": "column `label`", ".logits.npy": "file val.labels.npy"}
    with pytest.raises(
        ValueError, match=f"holds no labels, but they are needed here; add .*{place.get(suffix, '`labels`')}"
    ):
        read_scores(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.97])
def test_a_truncated_file_is_refused(tmp_path, suffix, keep):
    path = file_in(tmp_path, suffix)
    write_scores(path, **small(20, 4), classes=["one", "two", "three", "four"])
    whole = path.read_bytes()
    if suffix == ".csv":
        whole = whole.rstrip()[: whole.rstrip().rindex(b",")]
        match = "cells were expected|a column `label`|not the name or number"
    else:
        match = "truncated or of another kind"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ValueError, match=match):
        read_scores(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_another_format_under_this_suffix_is_refused(tmp_path, suffix):
    path = file_in(tmp_path, suffix)
    path.write_bytes(pickle.dumps({"logits": [1, 2], "labels": np.zeros(3)}))
    with pytest.raises(ValueError, match=r"truncated or of another kind|not comma-separated text"):
        read_scores(path)


def test_a_wrong_suffix_is_refused(untouched):
    with pytest.raises(ValueError, match=r"scores are kept as .npz, .*did you mean '.parquet'"):
        write_scores(untouched / "val.parqet", **small())
    (untouched / "val.npz").rename(untouched / "val.xyz")
    with pytest.raises(ValueError, match=r"val.xyz; use one of these"):
        read_scores(untouched / "val.xyz")
    (untouched / "val.xyz").rename(untouched / "val.npz")


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path):
    write_scores(tmp_path / "validation.npz", **small())
    with pytest.raises(FileNotFoundError, match=r"there is no file .*validaton.npz; did you mean 'validation.npz'\?$"):
        read_scores(tmp_path / "validaton.npz")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*x.csv; check the path"):
        read_scores(tmp_path / "x.csv")
    with pytest.raises(FileNotFoundError, match=r"nor a folder"):
        read_scores(tmp_path / "nowhere" / "x.csv")
    with pytest.raises(IsADirectoryError, match=r"is a folder"):
        read_scores(tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_writing_into_a_missing_folder(tmp_path, suffix):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first"):
        write_scores(file_in(tmp_path / "nowhere", suffix), **small())
    assert tree(tmp_path) == {}


def test_a_file_with_both_logits_and_probs_is_refused(tmp_path):
    logits = small()["logits"]
    np.savez(tmp_path / "a.npz", logits=logits, probs=logits.softmax(1))
    torch.save({"logits": logits, "probs": logits.softmax(1)}, tmp_path / "a.pt")
    save_file({"logits": logits, "probs": logits.softmax(1)}, tmp_path / "a.safetensors")
    for suffix in (".npz", ".pt", ".safetensors"):
        with pytest.raises(ValueError, match=f"a{suffix}: either logits or probs were expected, but both came"):
            read_scores(tmp_path / f"a{suffix}")


def test_a_file_with_neither_says_what_it_holds(tmp_path):
    tensors = {f"layer{i}.weight": torch.zeros(2) for i in range(7)}
    np.savez(tmp_path / "a.npz", **tensors)
    torch.save(tensors, tmp_path / "a.pt")
    save_file(tensors, tmp_path / "a.safetensors")
    for suffix in (".npz", ".pt", ".safetensors"):
        with pytest.raises(ValueError, match=r"must hold `logits` or `probs`, but holds 'layer0.weight'.* and 2 more"):
            read_scores(tmp_path / f"a{suffix}")


def test_what_a_file_says_wrong_is_told_with_its_path(tmp_path):
    np.savez(tmp_path / "a.npz", logits=[[1.0, math.nan], [1.0, 2.0]])
    with pytest.raises(ValueError, match=r"a.npz: logits must be finite, but row 0 holds NaN"):
        read_scores(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", logits=np.ones((3, 2)), labels=[0, 1])
    with pytest.raises(ValueError, match=r"b.npz: there are 3 rows of scores but 2 labels"):
        read_scores(tmp_path / "b.npz")


def test_npz_with_names_and_with_objects(tmp_path):
    np.savez(tmp_path / "a.npz", logits=np.eye(2) * 3, labels=np.array(["no", "yes"]), classes=np.array(["yes", "no"]))
    assert read_scores(tmp_path / "a.npz").labels.tolist() == [1, 0]
    np.savez(tmp_path / "b.npz", logits=np.array([[1, 2.0]], dtype=object))
    with pytest.raises(ValueError, match=r"b.npz cannot be read as an .npz archive"):
        read_scores(tmp_path / "b.npz")
    np.save(tmp_path / "c.npy", np.ones(3))
    (tmp_path / "c.npy").rename(tmp_path / "c.npz")
    with pytest.raises(ValueError, match=r"c.npz cannot be read as an .npz archive"):
        read_scores(tmp_path / "c.npz")


def test_pt_must_hold_a_dictionary_of_tensors(tmp_path):
    torch.save([torch.ones(2, 2)], tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"must hold a dictionary of tensors, but holds a list"):
        read_scores(tmp_path / "a.pt")
    torch.save({"logits": np.ones((2, 2))}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"must hold tensors and words only"):
        read_scores(tmp_path / "b.pt")
    torch.save({"logits": torch.eye(2) * 3, "labels": ["b", "a"], "classes": ["b", "a"]}, tmp_path / "c.pt")
    assert read_scores(tmp_path / "c.pt").labels.tolist() == [0, 1]


def test_npy_files_belong_together_by_name(tmp_path):
    for name in ("val.logits.npy", "test_probs.npy", "logits.npy", "logits/val_logits.npy"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        np.save(path, [[0.25, 0.75]] if "probs" in name else [[3.0, 4.0]])
        np.save(path.with_name(path.name.replace("logits", "labels").replace("probs", "labels")), [1])
        scores = read_scores(path)
        assert scores.labels.tolist() == [1]
        assert (scores.probs is None) == ("logits" in name)
    np.save(tmp_path / "val.npy", [[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"named like val.logits.npy or val_probs.npy.*but val.npy came"):
        read_scores(tmp_path / "val.npy")


def test_npy_siblings_that_would_not_belong_are_refused(tmp_path):
    write_scores(tmp_path / "val.logits.npy", **small())
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"val.labels.npy would belong to val.logits.npy, which comes without labels"):
        write_scores(tmp_path / "val.logits.npy", logits=small(7)["logits"])
    with pytest.raises(ValueError, match=r"val.logits.npy is to hold probs; call it val.probs.npy"):
        write_scores(tmp_path / "val.logits.npy", probs=small()["logits"].softmax(1))
    assert tree(tmp_path) == before


# ---------------------------------------------------------------------------------------------------------- tables


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "val.csv"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "labels", "classes"),
    [
        ("label,cat,dog\ncat,2,-1\ndog,0,3e0\n", [0, 1], ("cat", "dog")),
        ("label,cat,dog\n0,2,-1\n1.0,0,3\n", [0, 1], ("cat", "dog")),
        ("label,0,1\r\n0,2,-1\r\n\r\n1,0,3\r\n", [0, 1], None),
        ("cat, dog, label\n2, -1, dog\n0, 3, cat", [1, 0], ("cat", "dog")),
        ('\ufefflabel,"a, b",c\n"a, b",2,-1\nc,0,3\n', [0, 1], ("a, b", "c")),
        # Names that are numbers are names, even where the numbers would fit the columns.
        ("label,1,0\n0,2,-1\n1,0,3\n", [1, 0], ("1", "0")),
        ("label,7,3\n3,2,-1\n7.0,0,3\n", [1, 0], ("7", "3")),
    ],
)
def test_csv_as_people_write_it(tmp_path, text, labels, classes):
    scores = read_scores(csv_file(tmp_path, text))
    assert scores.logits.tolist() == [[2, -1], [0, 3]]
    assert scores.labels.tolist() == labels
    assert scores.classes == classes


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"must have a column `label` and one column per class, two at least, but has nothing"),
        ("label,a,b\n0,1,2\n1,3\n", r"val.csv, line 3: 3 cells were expected, as in the header, but 2 came"),
        ("label,a,b\n0,1,2,9\n", r"line 2: 3 cells were expected, as in the header, but 4 came"),
        ("label,a,b\n0,1,2\n1,3,x4\n", r"val.csv, line 3, column 'b': 'x4' is not a number"),
        ("label,a,b\n0,1,\n", r"line 2, column 'b': '' is not a number"),
        ("label,a,b\n0,1,nan\n", r"val.csv: logits must be finite, but row 0 holds NaN"),
        ("label,a,b\n2,1,2\n", r"line 2, column `label`: '2' is not the name or number of a class; labels here are"),
        ("label,a,b\n-1,1,2\n", r"'-1' is not the name or number"),
        ("label,a,b\n0.5,1,2\n", r"'0.5' is not the name or number"),
        ("label,cat,dog\ndgo,1,2\n", r"'dgo' is not the name or number of a class; did you mean 'dog'\?$"),
        ("label,7,3\n0,1,2\n", r"'0' is not the name or number of a class; labels here are '7', '3'"),
        ("label,a,a\n0,1,2\n", r"two columns called 'a'"),
        ("label,label,a\n0,1,2\n", r"two columns called 'label'"),
        ("label,a\n0,1\n", r"two at least, but has 'label', 'a'; .* one log-odds as two columns"),
        ("label;a;b\n0;1;2\n", r"but has 'label;a;b'; separate cells by commas"),
        (",label,a,b\n0,0,1,2\n", r"a column without a name, as pandas gives its index; write it with index=False"),
        ("Labels,a,b\n0,1,2\n", r"but has 'Labels'; rename that column `label`"),
        ("0,1.5,2.5\n1,2.5,3.5\n", r"begins with numbers \('0', '1.5', '2.5'\), but its first line must name"),
        ("1,1,1\n1,2.5,3.5\n", r"begins with numbers"),
        ("a,b\n1,2\n", r"holds no labels, but they are needed here; add a column `label`"),
        ('label,a,b\n0,1,"2\n', r"is not comma-separated text in UTF-8"),
    ],
)
def test_bad_csv_is_refused_with_its_place(tmp_path, text, match):
    with pytest.raises(ValueError, match=match):
        read_scores(csv_file(tmp_path, text))


def test_csv_in_another_encoding(tmp_path):
    (tmp_path / "val.csv").write_bytes("label,größe,b\n0,1,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"save it as CSV"):
        read_scores(tmp_path / "val.csv")


def test_a_csv_of_distributions_is_probs(tmp_path):
    scores = read_scores(csv_file(tmp_path, "a,b\n0.25,0.75\n1,0\n"), need_labels=False)
    assert scores.probs.tolist() == [[0.25, 0.75], [1, 0]]
    scores = read_scores(csv_file(tmp_path, "a,b\n0.25,0.75\n1,1\n"), need_labels=False)
    assert scores.probs is None


def test_a_csv_that_would_be_misread_is_not_written(untouched):
    with pytest.raises(ValueError, match=r"these logits would be taken for probs when val.csv is read again"):
        write_scores(untouched / "val.csv", logits=[[0.25, 0.75]])
    with pytest.raises(ValueError, match=r"these probs would be taken for logits"):
        write_scores(untouched / "val.csv", probs=torch.tensor([[1.0005, 0.0]]))


def test_parquet_says_which_it_holds(tmp_path):
    write_scores(tmp_path / "val.parquet", logits=[[0.25, 0.75]])
    assert read_scores(tmp_path / "val.parquet", need_labels=False).logits.tolist() == [[0.25, 0.75]]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("name", ["label", "Target", " a", "Unnamed: 0"])
def test_class_names_that_a_table_cannot_hold(untouched, suffix, name):
    with pytest.raises(ValueError, match=r"cannot hold a class called|column without a name"):
        write_scores(file_in(untouched, suffix), logits=[[1.0, 2.0]], classes=[name, "b"])


def test_tables_from_pandas(tmp_path):
    frame = pd.DataFrame({"cat": [1, 4], "dog": [2.5, 0.5], "label": pd.Categorical(["dog", "cat"])})
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    for name in ("a.parquet", "a.csv"):
        scores = read_scores(tmp_path / name)
        assert scores.logits.tolist() == [[1, 2.5], [4, 0.5]]
        assert scores.labels.tolist() == [1, 0]
    frame.index = ["x", "y"]
    frame.to_parquet(tmp_path / "b.parquet")
    frame.to_csv(tmp_path / "b.csv")
    for name in ("b.parquet", "b.csv"):
        with pytest.raises(ValueError, match=r"write it with index=False"):
            read_scores(tmp_path / name)


def test_pandas_reads_what_is_written(tmp_path):
    for name, read in (("a.parquet", pd.read_parquet), ("a.csv", pd.read_csv)):
        write_scores(tmp_path / name, logits=[[1.5, -2.0]], labels=[1], classes=["cat", "dog"])
        assert read(tmp_path / name).to_dict("list") == {"label": ["dog"], "cat": [1.5], "dog": [-2.0]}


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        ({"label": [0, 1], "a": [1.0, 2.0], "b": ["1", "x"]}, r"row 0, column 'b': '1' is not a number"),
        ({"label": [0, 1], "a": [1.0, 2.0], "b": [True, False]}, r"row 0, column 'b': 'True' is not a number"),
        ({"label": [0, 1], "a": [1.0, 2.0], "b": [1.0, None]}, r"logits must be finite, but row 1 holds NaN"),
        ({"label": ["a", None], "a": [1.0, 2.0], "b": [1.0, 2.0]}, r"row 1, column `label`: '' is not"),
        ({"label": [0, 5], "a": [1.0, 2.0], "b": [1.0, 2.0]}, r"row 1, column `label`: '5' is not"),
        ({"label": [0, 1], "a": [1.0, 2.0]}, r"two at least"),
    ],
)
def test_bad_parquet_is_refused_with_its_place(tmp_path, frame, match):
    pd.DataFrame(frame).to_parquet(tmp_path / "val.parquet")
    with pytest.raises(ValueError, match=match):
        read_scores(tmp_path / "val.parquet")


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path):
    path = tmp_path / "split=val" / "a.parquet"
    path.parent.mkdir()
    write_scores(path, **small())
    assert read_scores(path).num_classes == 3


def test_parquet_without_pyarrow_names_the_extra(untouched, monkeypatch):
    (untouched / "val.npz").rename(untouched / "val.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'pip install "poise\[tables\]"'):
        read_scores(untouched / "val.parquet")
    with pytest.raises(ImportError, match=r'pip install "poise\[tables\]"'):
        write_scores(untouched / "val.parquet", **small())
    (untouched / "val.parquet").rename(untouched / "val.npz")


# ----------------------------------------------------------------------------------------------------- calibrators


class Example(BaseEstimator):
    """A calibrator as far as a file is concerned: parameters, and learned values that end in _."""

    def __init__(self, noise="auto", head=None, neighbors=None):
        self.noise, self.head, self.neighbors = noise, head, neighbors

    def fit(self, value):
        self.value_ = value
        return self


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "Example", Example)


def learned(value, **params) -> Example:
    return Example(**params).fit(value)


def through_file(calibrator):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibrator.safetensors"
        save(calibrator, path)
        return load(path)


def raw(tensor: Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).untyped_storage().tolist()


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, (Tensor, np.ndarray)):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if isinstance(expected, Tensor):
            assert raw(found) == raw(expected)
        elif expected.dtype.kind in "OU":
            assert found.tolist() == expected.tolist()
        else:
            assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(found.items()), list(expected.items()))
    elif isinstance(expected, Example):
        assert_same(vars(found), vars(expected))
    elif isinstance(expected, float):
        assert repr(found) == repr(expected)  # which tells -0.0 from 0.0, and NaN is NaN
    else:
        assert found == expected


VALUES = [
    None,
    True,
    2**80,
    0.1,
    -0.0,
    5e-324,
    math.inf,
    math.nan,
    "ü\n\0",
    [1, (2, [3.0, ()]), {}],
    {"a": 1, 2: (3,), (4, "b"): None, "tuple": {"float": "inf"}},
    np.float64(0.1),
    np.float32("inf"),
    np.int64(3),
    np.bool_(True),
    np.str_("word"),
    np.array(["cat", "größe"]),
    np.array([["a"], ["bc"]], dtype=object),
    np.array([1, None, ("x", 2.0)], dtype=object),
    np.array([], dtype="<U1"),
    np.array("word"),
    np.array(2.5),
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.array([True, False]),
    np.array([1.0, math.nan], dtype=np.float16),
    np.zeros((0, 4), dtype=np.float32),
    torch.tensor(1.5, dtype=torch.float64),
    torch.tensor([[1.0, -math.inf]], dtype=torch.bfloat16),
    torch.arange(4),
    torch.tensor([True]),
    torch.zeros(0, 2),
    Gaussian(),
    GeneralizedNormal(beta=3.7),
    Additive(GeneralizedNormal(5.0)),
    [LogGamma(), Gaussian()],
    {"nested": [learned(torch.ones(2)), learned((learned(0.5),), noise=Gaussian())]},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_kind_of_value_comes_back(value):
    original = learned(value, noise=value)
    assert_same(through_file(original), original)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]))
arrays = npst.arrays(
    st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u1", "?"]), npst.array_shapes(min_side=0, max_side=3)
)
tensors = arrays.map(torch.from_numpy)
nested = st.recursive(
    scalars | arrays | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab.[]'", max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(nested, nested)
def test_any_nesting_comes_back(value, parameter):
    original = learned(value, head=parameter)
    assert_same(through_file(original), original)


def test_tensors_as_keys_are_kept_apart():
    ones, zeros = torch.ones(2), torch.zeros(2)
    found = through_file(learned({ones: zeros, zeros: ones})).value_
    assert [(key.tolist(), value.tolist()) for key, value in found.items()] == [([1, 1], [0, 0]), ([0, 0], [1, 1])]


def test_layout_alignment_and_independence():
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    original = learned([matrix.T, matrix.T.numpy(), matrix[::2, 1:], nn.Parameter(matrix), matrix.expand(2, 40, 30)])
    transposed, array, strided, parameter, expanded = through_file(original).value_
    assert transposed.stride() == matrix.T.stride()
    assert array.strides == matrix.T.numpy().strides
    assert torch.equal(transposed, matrix.T)
    assert torch.equal(strided, matrix[::2, 1:])
    assert torch.equal(parameter, matrix)
    assert not parameter.requires_grad
    assert torch.equal(expanded, matrix.expand(2, 40, 30))
    array[0, 0] = 7  # writable, and nobody else's
    assert transposed[0, 0] != 7


def test_reversed_read_only_and_big_endian_arrays():
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    backward, big = array[::-1, ::-1], array.astype(">f8")
    found = through_file(learned([array, backward, big])).value_
    for one, other in zip(found, [array, backward, big], strict=True):
        assert one.tolist() == other.tolist()


def test_the_file_is_plain_safetensors_and_json(tmp_path):
    path = tmp_path / "a.safetensors"
    save(learned(torch.ones(2), noise=(math.inf,)), path)
    assert list(load_file(path)) == ["value_"]
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    content = json.loads(header["poise"], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["format"] == FORMAT
    assert content["calibrator"]["calibrator"] == "Example"
    save(learned(torch.ones(2), noise=(math.inf,)), path)
    assert path.read_bytes() == raw
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_private_values_and_parameters_that_changed_since_are_not_mixed_up():
    original = learned(1.0)
    original._cache = object()
    original.__sneaky__ = object()
    assert set(vars(through_file(original))) == {"noise", "head", "neighbors", "value_"}


@dataclass(frozen=True)
class Gaussian2:
    """A noise of the user's own."""


class ListOfMine(list):
    pass


@pytest.mark.parametrize(
    ("params", "value", "match"),
    [
        (
            {"head": nn.Linear(2, 2)},
            1,
            r"Example cannot be saved, for its parameter `head` is of type Linear, .*set_params\(head=None\)",
        ),
        ({"head": lambda x: x}, 1, r"parameter `head` is of type function"),
        ({"noise": Gaussian2()}, 1, r"parameter `noise` is of type Gaussian2"),
        ({"noise": Gaussian}, 1, r"parameter `noise` is of type ABCMeta"),
        ({"neighbors": [{"t": torch.relu}]}, 1, r"parameter `neighbors\[0\]\['t'\]` is .*set_params\(neighbors=None\)"),
        ({}, object(), r"learned value `value_` is of type object, .*replace it by one of these"),
        ({}, [learned(1, head=print)], r"learned value `value_\[0\].head` is of type builtin_function"),
        ({}, ListOfMine(), r"of type ListOfMine"),
        ({}, np.array([1j]), r"of type ndarray \(complex128\)"),
        ({}, np.longdouble(1), r"of type longdouble"),
        ({}, np.array(["2020-01-01"], dtype="datetime64[D]"), r"of type ndarray \(datetime64\[D\]\)"),
        ({}, torch.tensor([1j]), r"of type Tensor \(torch.complex64"),
        ({}, torch.eye(2).to_sparse(), r"of type Tensor \(torch.float32, torch.sparse_coo\)"),
    ],
)
def test_what_is_code_is_refused_before_anything_is_written(untouched, params, value, match):
    with pytest.raises(TypeError, match=match):
        save(learned(value, **params), untouched / "a.safetensors")


def test_a_transform_is_refused_by_its_place(untouched):
    with pytest.raises(TypeError, match=r"parameter `neighbors.transform`.*set_params\(neighbors=None\)"):
        save(learned(1, neighbors=Augmented(torch.relu)), untouched / "a.safetensors")


def test_only_fitted_calibrators_are_saved_and_as_safetensors(untouched):
    with pytest.raises(NotFittedError, match=r"Example has learned nothing that could be saved; call fit"):
        save(Example(), untouched / "a.safetensors")
    with pytest.raises(TypeError, match=r"save takes a calibrator of poise, but a Linear came"):
        save(nn.Linear(2, 2), untouched / "a.safetensors")
    with pytest.raises(TypeError, match=r"save takes a calibrator of poise, but a type came"):
        save(Example, untouched / "a.safetensors")
    with pytest.raises(
        ValueError, match=r"a calibrator is kept as .safetensors, but .*a.pkl came; call it a.safetensors"
    ):
        save(learned(1), untouched / "a.pkl")
    with pytest.raises(FileNotFoundError, match=r"there is no folder"):
        save(learned(1), untouched / "nowhere" / "a.safetensors")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_save_leaves_the_old_calibrator(tmp_path, monkeypatch, error):
    path = tmp_path / "a.safetensors"
    save(learned(1), path)

    def half(tensors, temporary, **_):
        Path(temporary).write_bytes(b"half")
        raise error

    monkeypatch.setattr("poise.io.state.save_file", half)
    with pytest.raises(error):
        save(learned(2), path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    assert load(path).value_ == 1


def test_it_need_not_be_installed(tmp_path):
    """A folder on the path will do: nothing but the file's note of the version asks for more."""
    code = (
        "import sys, torch, poise; from importlib import metadata\n"
        "def missing(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = missing; z = torch.randn(50, 3); c = poise.TemperatureScaling().fit(z, z.argmax(1))\n"
        "poise.save(c, sys.argv[1]); print(poise.load(sys.argv[1]).temperature_ == c.temperature_)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "calibrator.safetensors")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == "True\n", ran.stderr


def test_load_refuses_what_is_not_a_calibrator(tmp_path):
    save(learned(torch.ones(5)), tmp_path / "calibrator.safetensors")
    with pytest.raises(FileNotFoundError, match=r"did you mean 'calibrator.safetensors'\?$"):
        load(tmp_path / "calibrator.safetensor")
    whole = (tmp_path / "calibrator.safetensors").read_bytes()
    for length in (0, 5, 40, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut.safetensors cannot be read as a safetensors file: it is truncated"):
            load(tmp_path / "cut.safetensors")
    save_file({"conv.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds no calibrator of poise, only 'conv.weight'"):
        load(tmp_path / "model.safetensors")
    write_scores(tmp_path / "scores.safetensors", **small())
    with pytest.raises(ValueError, match=r"scores are opened with poise.io.read_scores"):
        load(tmp_path / "scores.safetensors")
    with pytest.raises(ValueError, match=r"holds a calibrator, but scores were expected; open it with poise.load"):
        read_scores(tmp_path / "calibrator.safetensors")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_never_opened(tmp_path, protocol):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(Bomb(), protocol=protocol))
    with pytest.raises(ValueError, match=r"a.pkl is a pickle, and opening one can run anything"):
        load(path)
    torch.save({"a": Bomb()}, path)
    with pytest.raises(ValueError, match=r"a.pkl was written by torch.save or np.savez and not by poise.save"):
        load(path)
    assert not Bomb.exploded


class Bomb:
    exploded = False

    def __reduce__(self):
        return Bomb.explode, ()

    @staticmethod
    def explode():
        Bomb.exploded = True


def test_a_header_length_that_looks_like_a_pickle_is_read(tmp_path):
    path = tmp_path / "a.safetensors"
    for length in range(4000):
        save(learned("x" * length), path)
        if path.read_bytes()[:2] == b"\x80\x02":
            break
    else:
        pytest.fail("no header of 0x280 bytes was met")
    assert load(path).value_ == "x" * length


def rewritten(folder: Path, change) -> Path:
    """A saved calibrator whose JSON has been changed."""
    path = folder / "changed.safetensors"
    save(learned(torch.ones(2), noise=Gaussian()), path)
    raw = path.read_bytes()
    content = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["poise"])
    text = change(content)
    save_file(load_file(path), path, metadata={"poise": text if isinstance(text, str) else json.dumps(content)})
    return path


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda c: c.update(format=FORMAT + 1, version="9.9"),
            r"written by poise 9.9 in format 2, .*pip install --upgrade poise",
        ),
        (
            lambda c: c["calibrator"].update(calibrator="Exampel"),
            r"holds a Exampel, which poise .* does not know.*did you mean 'Example'",
        ),
        (lambda c: c["calibrator"]["params"]["noise"].update(record="Levy"), r"holds a Levy, which poise"),
        (lambda c: c["calibrator"]["params"]["noise"].update(record="Path"), r"holds a Path, which poise"),
        (lambda c: c["calibrator"]["params"].update(future=1), r"cannot be rebuilt .*future"),
        (lambda c: c["calibrator"].pop("learned"), r"cannot be rebuilt"),
        (lambda c: c["calibrator"]["learned"]["value_"]["tensor"].update(name="gone"), r"cannot be rebuilt"),
        (
            lambda c: c["calibrator"]["learned"].update(value_={"scalar": "fromfile", "value": "/etc/passwd"}),
            r"is no number",
        ),
        (lambda c: c["calibrator"]["learned"].update(value_={"scalar": "ones", "value": 3}), r"is no number"),
        (lambda c: c["calibrator"]["learned"].update(predict=1), r"cannot be rebuilt .*predict"),
        (lambda c: 5 * "[", r"cannot be read as a calibrator"),
        (lambda c: "{}", r"cannot be read as a calibrator"),
    ],
)
def test_changed_files_are_refused(tmp_path, change, match):
    with pytest.raises(ValueError, match=match):
        load(rewritten(tmp_path, change))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (20,), generator=generator)
    logits = 3 * torch.randn(20, 4, generator=generator)
    logits[torch.arange(20), labels] += 2
    return logits, labels


@pytest.mark.parametrize(
    "calibrator",
    [
        poise.TemperatureScaling(),
        poise.ConsistencyCalibration(noise=LogGamma(4.0)),
        poise.ConsistencyCalibration(noise=Uniform(), criterion="brier"),
        poise.SampledConsistency(neighbors=(Additive(Gaussian()), Additive(Uniform())), num_samples=50),
    ],
    ids=lambda calibrator: type(calibrator).__name__,
)
def test_predictions_are_the_same_bit_for_bit(tmp_path, calibrator):
    logits, labels = data()
    calibrator = clone(calibrator).fit(logits, labels, classes=["ant", "bee", "cat", "dog"])
    loaded = through_file(calibrator)
    assert torch.equal(loaded.predict_proba(logits), calibrator.predict_proba(logits))
    assert loaded.predict(logits).tolist() == calibrator.predict(logits).tolist()
    assert repr(loaded) == repr(calibrator)
    assert {name for name in vars(calibrator) if not name.startswith("_")} == set(vars(loaded))


def test_predictions_are_the_same_in_another_process(tmp_path):
    logits, labels = data()
    calibrator = poise.ConsistencyCalibration(noise=Gaussian()).fit(logits, labels)
    save(calibrator, tmp_path / "calibrator.safetensors")
    torch.save(logits, tmp_path / "logits.pt")
    code = """
import torch, poise
torch.save(poise.load("calibrator.safetensors").predict_proba(torch.load("logits.pt")), "p")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(tmp_path / "p"), calibrator.predict_proba(logits))


def test_a_head_is_taken_out_and_put_back_as_the_error_says(tmp_path):
    logits, labels = data()
    head = nn.Linear(4, 4).requires_grad_(False)
    calibrator = poise.SampledConsistency(head=head, num_samples=20).fit(logits, labels)
    with pytest.raises(TypeError, match=r"parameter `head` is of type Linear, .*call set_params\(head=None\) before"):
        save(calibrator, tmp_path / "a.safetensors")
    expected = calibrator.predict_proba(logits)
    loaded = through_file(calibrator.set_params(head=None)).set_params(head=head)
    assert torch.equal(loaded.predict_proba(logits), expected)


def test_what_was_learned_with_code_is_to_be_fitted_again(untouched):
    logits, labels = data()
    neighbors = Augmented(lambda inputs, strength: inputs + strength * torch.randn_like(inputs))
    calibrator = poise.SampledConsistency(neighbors=neighbors, num_samples=5).fit(logits, labels)
    with pytest.raises(TypeError, match=r"parameter `neighbors.transform` is of type function, .*fit it again"):
        save(calibrator, untouched / "a.safetensors")


# ---------------------------------------------------------------------------------------------------------- module


def test_csv_and_npz_need_no_extra(tmp_path):
    # scikit-learn imports pandas where it finds it, so absence is what can be tested.
    code = """
import sys
sys.modules |= dict.fromkeys(("pandas", "pyarrow", "matplotlib", "typer"))
import poise.io
for path in ("a.csv", "a.npz"):
    poise.io.write_scores(path, logits=[[1, 2]], labels=[0])
    assert poise.io.read_scores(path).logits.tolist() == [[1, 2]]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize("module", ["files", "scores", "state", "tables"])
def test_examples_run(module):
    assert doctest.testmod(importlib.import_module(f"poise.io.{module}")).failed == 0
