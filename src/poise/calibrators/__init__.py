"""Calibrators: fitted on validation logits and labels, they turn logits into probabilities one can believe."""

from poise.calibrators.affine import (
    DirichletCalibration,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from poise.calibrators.base import Calibrator
from poise.calibrators.binning import BayesianBinning, HistogramBinning
from poise.calibrators.classwise import ClasswiseTemperatureScaling
from poise.calibrators.clipping import FeatureClipping
from poise.calibrators.consistency import ConsistencyCalibration
from poise.calibrators.curves import BetaCalibration, IsotonicCalibration, SplineCalibration
from poise.calibrators.ensemble import EnsembleTemperatureScaling
from poise.calibrators.grouping import GroupCalibration
from poise.calibrators.order import IntraOrderPreserving
from poise.calibrators.parameterized import ParameterizedTemperatureScaling
from poise.calibrators.proximity import DensityAwareCalibration, ProximityCalibration
from poise.calibrators.sampled import SampledConsistency, paper_consistency
from poise.calibrators.temperature import TemperatureScaling

__all__ = [
    "BayesianBinning",
    "BetaCalibration",
    "Calibrator",
    "ClasswiseTemperatureScaling",
    "ConsistencyCalibration",
    "DensityAwareCalibration",
    "DirichletCalibration",
    "EnsembleTemperatureScaling",
    "FeatureClipping",
    "GroupCalibration",
    "HistogramBinning",
    "IntraOrderPreserving",
    "IsotonicCalibration",
    "MatrixScaling",
    "ParameterizedTemperatureScaling",
    "ProximityCalibration",
    "SampledConsistency",
    "SplineCalibration",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "TemperatureScaling",
    "VectorScaling",
    "paper_consistency",
]
