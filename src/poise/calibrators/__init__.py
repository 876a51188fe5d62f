"""Calibrators: fitted on validation logits and labels, they turn logits into probabilities one can believe."""

from poise.calibrators.affine import (
    DirichletCalibration,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from poise.calibrators.base import Calibrator
from poise.calibrators.classwise import ClasswiseTemperatureScaling
from poise.calibrators.consistency import ConsistencyCalibration
from poise.calibrators.ensemble import EnsembleTemperatureScaling
from poise.calibrators.parameterized import ParameterizedTemperatureScaling
from poise.calibrators.sampled import SampledConsistency, paper_consistency
from poise.calibrators.temperature import TemperatureScaling

__all__ = [
    "Calibrator",
    "ClasswiseTemperatureScaling",
    "ConsistencyCalibration",
    "DirichletCalibration",
    "EnsembleTemperatureScaling",
    "MatrixScaling",
    "ParameterizedTemperatureScaling",
    "SampledConsistency",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "TemperatureScaling",
    "VectorScaling",
    "paper_consistency",
]
