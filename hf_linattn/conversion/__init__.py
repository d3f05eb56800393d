"""From softmax attention to linear attention: pretrained models, and published weights of other linear ones."""

from .checkpoint import write_checkpoint
from .linearize import ConversionWarning, linear_config, linearize
from .loading import new_parameters

__all__ = ["ConversionWarning", "linear_config", "linearize", "new_parameters", "write_checkpoint"]
