"""Attention layers built on `ops` and `cache`."""

from .linear_attention import NORMALIZERS, ROPE_POSITIONS, LinearAttention, Packing
from .short_conv import ShortConvolution
from .sliding import SlidingLinearAttention

__all__ = [
    "NORMALIZERS",
    "ROPE_POSITIONS",
    "LinearAttention",
    "Packing",
    "ShortConvolution",
    "SlidingLinearAttention",
]
