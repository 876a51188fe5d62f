"""Scores and calibrators in and out of files: written whole or not at all, never pickled, refused with a sentence."""

from poise.io.files import atomic
from poise.io.folder import Folder
from poise.io.scores import Scores, read_scores, write_scores
from poise.io.state import load, save

__all__ = ["Folder", "Scores", "atomic", "load", "read_scores", "save", "write_scores"]
