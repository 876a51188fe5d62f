"""What the documentation shows, runs: the docstrings' examples, and the code blocks of the README and docs.

One page's blocks run in order, in one namespace and one folder, which starts with ``val.npz`` and ``test.npz``, the
logits of `poise demo`. A fence with the word `no-run` after its language is only shown.

- ```` ```python ```` runs; if a ```` ```text ```` block follows directly, it is what the code prints.
- ```` ```console ```` and ```` ```sh ````: the lines that start with `poise` or `$ poise` run and must succeed.

In printed output, ``...`` stands for anything and white space is not compared.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import poise
from conftest import ROOT

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SOURCE = ROOT / "src"
SCORES = SOURCE / "poise" / "data" / "cifar10" / "resnet50.cross-entropy" / "scores"

MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((SOURCE / "poise").rglob("*.py"))
    if ">>> " in path.read_text("utf-8")
]


class Block(NamedTuple):
    info: str
    text: str
    line: int
    follows_directly: bool

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info.split() else ""

    @property
    def runs(self) -> bool:
        return "no-run" not in self.info.split()

    @property
    def commands(self) -> list[str]:
        """The `poise ...` lines of a console block, with or without the prompt; a backslash continues a line."""
        if self.language not in ("console", "sh"):
            return []
        lines = [line.strip().removeprefix("$ ") for line in self.text.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line.split()[:1] == ["poise"]]


FENCED = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> list[Block]:
    """A page's fenced blocks; one follows directly when nothing but blank lines stands between it and the last."""
    blocks, end = [], None
    for found in FENCED.finditer(page):
        directly = end is not None and not page[end : found.start()].strip()
        line = page.count("\n", 0, found.start()) + 2
        blocks.append(Block(found["info"].strip(), textwrap.dedent(found["text"]), line, directly))
        end = found.end()
    return blocks


def run_python(block: Block, page: Path, namespace: dict[str, object]) -> str:
    # Blank lines before the code: a traceback then shows the page's own line numbers.
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def run_command(command: str, folder: Path, where: str) -> None:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"PATH": programs, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, f"{where}: {command}\n{ran.stdout}{ran.stderr}"


def run_page(page: Path, folder: Path) -> int:
    """Runs every block of a page and says how many were run."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = blocks_of(page.read_text("utf-8"))
    ran = 0
    for number, block in enumerate(blocks):
        if not block.runs:
            continue
        if block.language == "python":
            printed = run_python(block, page, namespace)
            shown = blocks[number + 1] if number + 1 < len(blocks) else None
            if shown is not None and shown.follows_directly and shown.language == "text" and shown.runs:
                check_printed(shown.text, printed, f"{page.name}, line {shown.line}")
            ran += 1
        for command in block.commands:
            run_command(command, folder, f"{page.name}, line {block.line}")
            ran += 1
    return ran


def check_printed(shown: str, printed: str, where: str) -> None:
    checker = doctest.OutputChecker()
    if not checker.check_output(shown, printed, OPTIONS):
        difference = checker.output_difference(doctest.Example("", shown), printed, OPTIONS)
        pytest.fail(f"{where}: the page shows something else than what is printed.\n{difference}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of its own to work in, with logits to try things on."""
    for split in ("val", "test"):
        shutil.copy(SCORES / f"{split}.npz", tmp_path / f"{split}.npz")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name, folder):
    module = importlib.import_module(name)
    public = {name: getattr(poise, name) for name in poise.__all__}
    namespace = {"torch": torch, "np": np, "poise": poise} | public | vars(module)
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    report: list[str] = []
    for test in doctest.DocTestFinder().find(module, name, globs=namespace):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
    assert runner.tries > 0


def has_something_to_run(page: Path) -> bool:
    blocks = [block for block in blocks_of(page.read_text("utf-8")) if block.runs]
    return any(block.language == "python" or block.commands for block in blocks)


PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.exists() and has_something_to_run(page)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page, folder):
    run_page(page, folder)


def test_links_lead_somewhere():
    """Relative links of the pages point at files that exist."""
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = FENCED.sub("", page.read_text("utf-8"))
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


PAGE = """
```python
total = 1 + 1
print("total", total)
```

```text
total ...
```

Words.

1. An indented one:
   ```python
   print(total + 1)
   ```
   ```text
   {shown}
   ```

```python no-run
raise SystemExit
```

```console
$ ls
$ poise {command}
```
"""


def test_pages_are_really_run(tmp_path):
    """The runner of this file: it keeps one namespace, compares what is printed and notices a command that fails."""
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(shown="3", command="--help"))
    assert run_page(page, tmp_path) == 3
    page.write_text(PAGE.format(shown="4", command="--help"))
    with pytest.raises(pytest.fail.Exception, match="line 18"):
        run_page(page, tmp_path)
    page.write_text(PAGE.format(shown="3", command="no-such-command"))
    with pytest.raises(AssertionError, match="no-such-command"):
        run_page(page, tmp_path)
