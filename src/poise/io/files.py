"""Files whole or absent: replaced at one instant, looked for with a hint, and refused with a sentence when damaged."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from poise import _check

FilePath: TypeAlias = str | os.PathLike[str]


@contextmanager
def atomic(path: FilePath) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and else leaves nothing behind.

    Whoever reads meanwhile sees the old file or the new one, never half of it, and after an error or Ctrl-C the old one
    still. A link goes on pointing where it pointed, and a file that was there keeps its permissions. The folder must
    exist. Power lost within seconds of the end may still lose the new file: nothing waits for the disk.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic(f"{folder}/note.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     [file.name for file in pathlib.Path(folder).iterdir()]
    ['note.txt']
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"a file was to be written, but {path} is a folder; name a file in it.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written, for there is no folder {target.parent}; make it first.")
    temporary = target.with_name(f".{secrets.token_hex(8)}{target.suffix}")
    try:
        temporary.touch(exist_ok=False)
        mode = stat.S_IMODE((target if target.exists() else temporary).stat().st_mode)
        yield temporary
        # safetensors makes files that only their owner may read; a file has the rights that open() would have given.
        temporary.chmod(mode)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def existing(path: FilePath) -> Path:
    """The path of a file that is there; else an error with the nearest name in its folder."""
    file = Path(path)
    if file.is_dir():
        raise IsADirectoryError(f"a file was expected, but {path} is a folder; name a file in it.")
    if not file.exists():
        if not file.parent.is_dir():
            raise FileNotFoundError(f"there is no file {path}, nor a folder {file.parent}; check the path.")
        hint = _check._nearest(file.name, (other.name for other in file.parent.iterdir() if other.is_file()))
        raise FileNotFoundError(f"there is no file {path}{hint or '; check the path.'}")
    return file


@contextmanager
def reading(file: Path, what: str, remedy: str) -> Iterator[None]:
    """Whatever a reader says about a damaged file becomes one sentence."""
    try:
        yield
    except (PermissionError, MemoryError, ImportError):
        raise
    # Each format's reader has its own dozen errors for bytes it did not expect; what they say is kept as the cause.
    except Exception as error:
        raise ValueError(f"{file} cannot be read as {what}: it is truncated or of another kind; {remedy}.") from error


def listed(names: Iterable[str]) -> str:
    """The first few names, for an error."""
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:5]) + (f" and {len(quoted) - 5} more" if len(quoted) > 5 else "") or "nothing"
