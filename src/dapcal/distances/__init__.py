"""Distances from the training inputs: where they are measured, how, and which of them count."""

from dapcal.distances.choosing import Measured, informative
from dapcal.distances.class_gaussian import ClassGaussian, NearestClass
from dapcal.distances.coresets import Coreset
from dapcal.distances.graph import HNSW
from dapcal.distances.inverted_lists import IVF
from dapcal.distances.metrics import MMD, Hausdorff, NearestNeighbor, hausdorff, mmd, nearest
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.on_disk import OnDisk
from dapcal.distances.projectors import Features, Identity, LayerFeatures, MemberFeatures, RandomFourier, Vae
from dapcal.distances.quantised import ProductQuantised
from dapcal.distances.radius import Radius, fit_radius
from dapcal.distances.shards import ShardedIndex
from dapcal.distances.spaces import Distance, FittedSpace, Space, fit_distance, raw_in
from dapcal.distances.standardised import Standardised

__all__ = [
    "HNSW", "IVF", "MMD", "ClassGaussian", "Coreset", "Distance", "Features", "FittedSpace", "Hausdorff", "Identity",
    "LayerFeatures", "Measured", "MemberFeatures", "NearestClass", "NearestNeighbor", "OnDisk", "ProductQuantised",
    "Radius", "RandomFourier", "ShardedIndex", "Space", "Standardised", "TorchIndex", "Vae", "fit_distance",
    "fit_radius", "hausdorff", "informative", "mmd", "nearest", "raw_in",
]  # fmt: skip
