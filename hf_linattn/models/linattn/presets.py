"""Three useful corners of what a `LinAttnConfig` can be."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # what recalled most in the least state, with a convolution (model_cards/recall)
    "recall": {
        "feature_map": "hedgehog",
        "feature_map_kwargs": None,
        "normalizer": "denominator",
        "rope_position": "none",
        "conv_kernel_size": 4,
        "qk_norm": True,
    },
    # a map without parameters, which the CPU kernels compute, in the smallest state
    "fast": {
        "feature_map": "elu1",
        "feature_map_kwargs": None,
        "normalizer": "denominator",
        "rope_position": "none",
        "conv_kernel_size": 4,
        "qk_norm": True,
    },
    # linear attention as it was published, with Llama's rotations (arXiv:2006.16236)
    "seed": {
        "feature_map": "elu1",
        "feature_map_kwargs": None,
        "normalizer": "denominator",
        "rope_position": "before",
        "conv_kernel_size": 0,
        "qk_norm": False,
    },
}


def preset(name: str) -> dict[str, Any]:
    """The fields of a preset; a copy.

    Raises:
        ValueError: no preset has this name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; choose one of {list(PRESETS)}")
    return dict(PRESETS[name])
