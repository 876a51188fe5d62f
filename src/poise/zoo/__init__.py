"""The paper's networks and data, how they are trained, and how logits and features are taken from them."""

from poise.zoo.checkpoints import load_weights
from poise.zoo.datasets import DATASETS, Dataset, dataset
from poise.zoo.networks import NETWORKS, network

__all__ = ["DATASETS", "NETWORKS", "Dataset", "dataset", "load_weights", "network"]
