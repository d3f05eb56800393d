"""Feature maps phi: R^D -> R^F, one formula per class, found by name in `FEATURE_MAPS`."""

from .base import FEATURE_MAPS, FeatureMap, feature_map_class, make_feature_map, register_feature_map
from .fixed import DPFP, Elu1, Exp, Identity, Relu, Softmax, SquaredRelu, Taylor2
from .learned import T2R, Hedgehog, HedgehogJoint, Rebased
from .positional import Cosformer
from .random import Favor

__all__ = [
    "DPFP",
    "FEATURE_MAPS",
    "Cosformer",
    "Elu1",
    "Exp",
    "Favor",
    "FeatureMap",
    "Hedgehog",
    "HedgehogJoint",
    "Identity",
    "Rebased",
    "Relu",
    "Softmax",
    "SquaredRelu",
    "T2R",
    "Taylor2",
    "feature_map_class",
    "make_feature_map",
    "register_feature_map",
]
