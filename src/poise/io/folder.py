"""Tensors kept by name in a folder, each in a file of its own: what an interrupted run goes on from."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from poise.io.files import FilePath, atomic, existing, reading


@dataclass(frozen=True)
class Folder(MutableMapping[str, Tensor]):
    """A dictionary of tensors that outlives the process; the folder is made when something is first put into it.

    Each file is written whole or not at all, so that an interruption loses at most the part at work. Delete the folder
    when the work is done.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Folder(folder)["part"] = torch.ones(2)
    ...     dict(Folder(folder))
    {'part': tensor([1., 1.])}
    """

    path: FilePath

    def __getitem__(self, name: str) -> Tensor:
        file = self._file(name)
        if not file.exists():
            raise KeyError(name)
        with reading(existing(file), "a kept part", "delete it, and it is computed again"):
            return load_file(file)["part"].clone()

    def __setitem__(self, name: str, value: Tensor) -> None:
        Path(self.path).mkdir(parents=True, exist_ok=True)
        with atomic(self._file(name)) as temporary:
            save_file({"part": value.contiguous()}, temporary)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._file(name).unlink()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._file(name).exists()

    def __iter__(self) -> Iterator[str]:
        folder = Path(self.path)
        return (file.stem for file in sorted(folder.glob("[!.]*.safetensors"))) if folder.is_dir() else iter(())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _file(self, name: str) -> Path:
        return Path(self.path) / f"{name}.safetensors"
