"""Calibrators: fitted on validation logits and labels, they turn logits into probabilities one can believe."""

from poise.calibrators.base import Calibrator
from poise.calibrators.consistency import ConsistencyCalibration
from poise.calibrators.sampled import SampledConsistency, paper_consistency
from poise.calibrators.temperature import TemperatureScaling

__all__ = ["Calibrator", "ConsistencyCalibration", "SampledConsistency", "TemperatureScaling", "paper_consistency"]
