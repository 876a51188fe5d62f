"""How a neighbour of x is drawn: the ⊕ ε z of p = E[g(h(x ⊕ ε z))].

Added noise at the logits, the features or any activation; noise on features seen behind a linear head; augmented
images. The random part z is drawn apart from the strength ε, so that the same draws serve every strength.
"""

from poise.neighbors.base import Additive, Augmented, Neighbors, ThroughLinear
from poise.neighbors.images import TrainAugmentation, moderate, strong, weak

__all__ = [
    "Additive",
    "Augmented",
    "Neighbors",
    "ThroughLinear",
    "TrainAugmentation",
    "moderate",
    "strong",
    "weak",
]
