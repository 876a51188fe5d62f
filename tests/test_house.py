"""The house: imports point one way, the public list is true, and every file passes the linter and the type checker."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import poise
from conftest import ROOT

SOURCE = ROOT / "src" / "poise"
FILES = sorted(SOURCE.rglob("*.py"))
PYTHON = sorted(path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

FLOORS = [
    {"_types", "_arrays", "_check", "kernels"},
    {"noise", "readout", "neighbors", "progress"},
    {"link", "sampling", "search"},
    {"calibrators"},
    {"io", "compare", "model", "local"},
    {"plots", "report", "bench"},
    {"cli"},
]
"""Rooms of the package from the ground up: a room imports its own floor, without cycles, and those below."""

MEASURING = {"metrics"}
"""Stands on the ground floor alone; calibrators and all above it may measure."""

ALONE = {"losses"}
"""Stands on the ground floor alone; used by nobody here but the zoo."""

OUTSIDE = {"zoo", "paper"}
"""Import what a user could."""

ROOT_PACKAGE = "poise"
"""The public list itself."""

OWNERS = {
    "matplotlib": {"plots"},
    "plotly": {"report"},
    "triton": {"kernels", "link"},
    "typer": {"cli"},
    "rich": {"cli"},
    "kornia": {"neighbors"},
    "torchvision": {"neighbors"},
    # To read the official CIFAR archives, by an unpickler that looks up no name.
    "pickle": {"zoo"},
}
"""The only rooms that import what is heavy, optional or unsafe."""


def room_of(file: Path) -> str:
    """The first name below `poise`; the package's own ``__init__`` and ``__main__`` are its entrance."""
    first = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return ROOT_PACKAGE if first == "__init__" else "cli" if first == "__main__" else first


ROOMS = {room_of(file) for file in FILES}


def imported(file: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, wherever in the file it does."""
    package = ["poise", *file.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def imported_rooms(file: Path) -> set[str]:
    """Rooms that a file imports from, other than its own; the public list where a name is no room."""
    names = [name.split(".") for name in imported(file)]
    rooms = {name[1] if len(name) > 1 and name[1] in ROOMS else ROOT_PACKAGE for name in names if name[0] == "poise"}
    return rooms - {room_of(file)}


def allowed(room: str) -> set[str]:
    ground = FLOORS[0]
    if room in MEASURING | ALONE:
        return ground
    public = {other for other in ROOMS if not other.startswith("_")} - {"cli"}
    if room in OUTSIDE:
        return public
    floor = next(number for number, rooms in enumerate(FLOORS) if room in rooms)
    below = set().union(*FLOORS[: floor + 1])
    if room == "cli":
        return below | public
    return below | (MEASURING if floor >= 3 else set())


@pytest.mark.parametrize("room", sorted(ROOMS - {ROOT_PACKAGE}))
def test_imports_point_one_way(room):
    assert room in set().union(*FLOORS, MEASURING, ALONE, OUTSIDE), f"give {room} a place in the table above"
    for file in FILES:
        if room_of(file) == room:
            refused = imported_rooms(file) - allowed(room)
            assert not refused, f"{file.relative_to(ROOT)} must not import {sorted(refused)}"


def test_nobody_imports_the_command_line():
    importers = [file.name for file in FILES if "cli" in imported_rooms(file)]
    assert not importers


def test_rooms_have_no_cycles():
    within = {room: set() for room in ROOMS}
    for file in FILES:
        within[room_of(file)] |= imported_rooms(file)
    within.pop(ROOT_PACKAGE)
    tuple(graphlib.TopologicalSorter({room: needs - {ROOT_PACKAGE} for room, needs in within.items()}).static_order())


@pytest.mark.parametrize("package", OWNERS)
def test_only_the_owner_imports(package):
    users = {room_of(file) for file in FILES if any(name.split(".")[0] == package for name in imported(file))}
    assert users <= OWNERS[package]


def test_import_is_light():
    """`import poise` takes what it needs and none of the extras, nor does it need them."""
    extras = ["matplotlib", "plotly", "typer", "rich", "kornia", "ray", "onnx", "pandas", "pyarrow"]
    # scikit-learn itself looks for pandas: what it and torch load is not poise's doing.
    loads = (
        "import sys, torch, sklearn.base; before = set(sys.modules); import poise; print(*set(sys.modules) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert not set(extras).intersection(ran.stdout.split())
    needs = f"import sys; sys.modules |= dict.fromkeys({extras}); import poise; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", needs], capture_output=True, text=True, check=True)
    assert {"torch", "numpy", "scipy", "sklearn"} <= set(ran.stdout.split())


def test_public_list():
    assert poise.__all__ == sorted(set(poise.__all__))
    submodules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    leaked = {name for name in vars(poise) if not name.startswith("_")} - set(poise.__all__) - submodules
    assert not leaked


@pytest.mark.parametrize(
    "module", ["poise", *(f"poise.{room}" for room in sorted(ROOMS - {ROOT_PACKAGE}) if not room.startswith("_"))]
)
def test_public_names_exist_and_are_explained(module):
    if module == "poise.cli":
        pytest.importorskip("typer")
    members = importlib.import_module(module)
    assert members.__doc__
    for name in getattr(members, "__all__", ()):
        member = getattr(members, name)
        # A class inherits nobody's docstring here, and a dataclass's default one is only its signature.
        written = vars(member).get("__doc__") if inspect.isclass(member) else member.__doc__
        assert written, f"{module}.{name} has no docstring"
        assert not re.fullmatch(rf"{name}\(.*\)", written), f"{module}.{name} has no docstring of its own"


def run_tool(*command: str) -> None:
    ran = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_linter_and_types(command):
    run_tool(*command.split())


def test_files_say_what_is_in_them():
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [path for path in PYTHON if vague & {path.stem, *path.relative_to(ROOT).parent.parts}]


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_every_module_opens_with_a_sentence():
    assert not [str(path) for path in PYTHON if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]


def test_nothing_names_a_machine_or_a_registry():
    """Paths of one machine, or the address that packages come from, would be wrong everywhere else."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("this is not a git checkout: which files belong to the project is not known.")
    # The groups keep the pattern from finding itself.
    unwanted = re.compile(rb"/(?:work)/|(?:pypi)[.]org|(?:python)hosted")
    found = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        file = ROOT / name
        if file.is_file() and (match := unwanted.search(file.read_bytes())):
            found[name] = match[0]
    assert found == {}


def test_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    version = project["version"]
    assert poise.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_every_dependency_has_a_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.match(r"[\w.-]+", need)[0] for need in needed} - {project["name"]}
    pins = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert {pin.split("==")[0] for pin in pins} == names
