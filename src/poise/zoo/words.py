"""Names that users type, and the nearest right ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, options: Iterable[str]) -> str:
    """The end of an error's sentence.

    >>> nearest("resnet5", ["resnet50", "densenet121"])
    "; did you mean 'resnet50'?"
    """
    close = difflib.get_close_matches(word, list(options), n=2)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
