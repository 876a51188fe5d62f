"""poise makes a classifier's confidence true: consistency calibration, exact and sampled, and what it is compared with.

p_k(x) = E_z [ g_k( h( x ⊕ ε z ) ) ]
"""

from poise import io, link, losses, metrics, neighbors, noise, readout, sampling
from poise.calibrators import (
    BayesianBinning,
    BetaCalibration,
    ClasswiseTemperatureScaling,
    ConsistencyCalibration,
    DensityAwareCalibration,
    DirichletCalibration,
    EnsembleTemperatureScaling,
    FeatureClipping,
    GroupCalibration,
    HistogramBinning,
    IntraOrderPreserving,
    IsotonicCalibration,
    MatrixScaling,
    ParameterizedTemperatureScaling,
    ProximityCalibration,
    SampledConsistency,
    SplineCalibration,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
    paper_consistency,
)
from poise.compare import Comparison, Recommendation, compare, recommend
from poise.io import Scores, load, read_scores, save, write_scores
from poise.link import Link
from poise.local import consistency, local_uncertainty
from poise.model import CalibratedModel, split
from poise.neighbors import Additive, Augmented
from poise.search import BoundWarning

__version__ = "0.1.0"

__all__ = [
    "Additive",
    "Augmented",
    "BayesianBinning",
    "BetaCalibration",
    "BoundWarning",
    "CalibratedModel",
    "ClasswiseTemperatureScaling",
    "Comparison",
    "ConsistencyCalibration",
    "DensityAwareCalibration",
    "DirichletCalibration",
    "EnsembleTemperatureScaling",
    "FeatureClipping",
    "GroupCalibration",
    "HistogramBinning",
    "IntraOrderPreserving",
    "IsotonicCalibration",
    "Link",
    "MatrixScaling",
    "ParameterizedTemperatureScaling",
    "ProximityCalibration",
    "Recommendation",
    "SampledConsistency",
    "Scores",
    "SplineCalibration",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "TemperatureScaling",
    "VectorScaling",
    "compare",
    "consistency",
    "io",
    "link",
    "load",
    "local_uncertainty",
    "losses",
    "metrics",
    "neighbors",
    "noise",
    "paper_consistency",
    "read_scores",
    "readout",
    "recommend",
    "sampling",
    "save",
    "split",
    "write_scores",
]
