"""Three useful corners of what a `LinAttnConfig` can be."""

from typing import Any

# the smallest state, no parameters, and kernels on a CPU: what a new model is unless told otherwise
FAST: dict[str, Any] = {
    "feature_map": "elu1",
    "feature_map_kwargs": None,
    "normalizer": "denominator",
    "rope_position": "none",
    "conv_kernel_size": 4,
    "qk_norm": False,
}
PRESETS = {
    # recalled everything in the least room (model_cards/recall)
    "recall": FAST | {"feature_map": "rebased"},
    "fast": FAST,
    # linear attention as it was published, with Llama's rotations (arXiv:2006.16236)
    "seed": FAST | {"rope_position": "before", "conv_kernel_size": 0},
}


def preset(name: str) -> dict[str, Any]:
    """The fields of a preset; a copy.

    Raises:
        ValueError: no preset has this name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; choose one of {list(PRESETS)}")
    return dict(PRESETS[name])
