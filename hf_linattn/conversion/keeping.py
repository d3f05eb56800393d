"""Which layers keep full attention."""

from __future__ import annotations

from collections.abc import Sequence


def kept_layers(keep_layers: Sequence[int] | float | str, num_layers: int) -> list[int]:
    """Indices of the layers that stay full attention, in order.

    Args:
        keep_layers: indices from 0; or a fraction f with 0 < f < 1, of which round(f L) layers (at least one) are kept,
            each in the middle of its share of the L layers: floor((j + 1/2) L / n) for j < n; or `"all"`.

    Raises:
        ValueError: an index that there is not, a fraction outside (0, 1), another word.
    """
    choices = 'give indices, a fraction between 0 and 1, or "all"'
    if isinstance(keep_layers, str):
        if keep_layers == "all":
            return list(range(num_layers))
        if keep_layers.startswith("auto"):
            raise ValueError(
                f"keep_layers={keep_layers!r} needs a ranking of layers, which is measured in training and not known "
                f"to a conversion; {choices}"
            )
        raise ValueError(f"keep_layers={keep_layers!r} is unknown; {choices}")
    if isinstance(keep_layers, float):
        if not 0 < keep_layers < 1:
            raise ValueError(f"keep_layers={keep_layers} is no fraction; {choices}")
        count = max(1, round(keep_layers * num_layers))
        return [(2 * j + 1) * num_layers // (2 * count) for j in range(count)]
    if isinstance(keep_layers, int):
        raise ValueError(f"keep_layers={keep_layers} could be an index or a number of layers; {choices}")
    for index in keep_layers:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_layers:
            raise ValueError(f"keep_layers has {index!r}, and the model has layers 0 to {num_layers - 1}; {choices}")
    return sorted(set(keep_layers))
