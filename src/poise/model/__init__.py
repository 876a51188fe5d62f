"""Networks: cut at any layer into what is below and what is above, and wrapped so that their probabilities are true."""

from poise.model.calibrated import CalibratedModel
from poise.model.network import Network
from poise.model.split import RerunWarning, Split, split

__all__ = ["CalibratedModel", "Network", "RerunWarning", "Split", "split"]
