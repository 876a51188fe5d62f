"""The paper's networks and data, how they are trained, and how logits and features are taken from them."""

from poise.zoo.answers import shipped, shipped_config, shipped_scores
from poise.zoo.augment import crop_and_flip
from poise.zoo.checkpoints import load_weights
from poise.zoo.datasets import DATASETS, NORMALIZATIONS, Dataset, Images, Normalization, Pixels, dataset
from poise.zoo.extraction import extract
from poise.zoo.networks import NETWORKS, network
from poise.zoo.recipes import LOSSES, RECIPES, Recipe, loss_for
from poise.zoo.runs import load_run
from poise.zoo.training import train

__all__ = [
    "DATASETS",
    "LOSSES",
    "NETWORKS",
    "NORMALIZATIONS",
    "RECIPES",
    "Dataset",
    "Images",
    "Normalization",
    "Pixels",
    "Recipe",
    "crop_and_flip",
    "dataset",
    "extract",
    "load_run",
    "load_weights",
    "loss_for",
    "network",
    "shipped",
    "shipped_config",
    "shipped_scores",
    "train",
]
