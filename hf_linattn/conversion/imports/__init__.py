"""Weights that others published for linear attention, as models of this package: what carries exactly, and no more.

import_lolcats    feature maps, window factors and LoRA of LoLCATs, onto the softmax model they were trained for
import_fla        `linear_attn` checkpoints of flash-linear-attention
"""

from .fla import import_fla
from .lolcats import import_lolcats

__all__ = ["import_fla", "import_lolcats"]
