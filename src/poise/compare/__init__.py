"""Which method is best on your own logits: the comparison one can trust, and the recommendation."""

from poise.compare.comparison import Cell, Column, Comparison, Row
from poise.compare.measures import DEFAULT_METRICS, MEASURES
from poise.compare.methods import default_methods, named
from poise.compare.race import Candidate
from poise.compare.recommend import Recommendation, recommend
from poise.compare.run import compare

__all__ = [
    "DEFAULT_METRICS",
    "MEASURES",
    "Candidate",
    "Cell",
    "Column",
    "Comparison",
    "Recommendation",
    "Row",
    "compare",
    "default_methods",
    "named",
    "recommend",
]
