"""poise makes a classifier's confidence true: consistency calibration, exact and sampled, and what it is compared with.

p_k(x) = E_z [ g_k( h( x ⊕ ε z ) ) ]
"""

from poise import io, link, metrics, neighbors, noise, readout, sampling
from poise.calibrators import (
    ClasswiseTemperatureScaling,
    ConsistencyCalibration,
    DirichletCalibration,
    EnsembleTemperatureScaling,
    MatrixScaling,
    ParameterizedTemperatureScaling,
    SampledConsistency,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
    paper_consistency,
)
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
    "BoundWarning",
    "CalibratedModel",
    "ClasswiseTemperatureScaling",
    "ConsistencyCalibration",
    "DirichletCalibration",
    "EnsembleTemperatureScaling",
    "Link",
    "MatrixScaling",
    "ParameterizedTemperatureScaling",
    "SampledConsistency",
    "Scores",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "TemperatureScaling",
    "VectorScaling",
    "consistency",
    "io",
    "link",
    "load",
    "local_uncertainty",
    "metrics",
    "neighbors",
    "noise",
    "paper_consistency",
    "read_scores",
    "readout",
    "sampling",
    "save",
    "split",
    "write_scores",
]
