"""Which linear layers miss their softmax attention most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..models.linattn.modeling_linattn import FullAttention
from .transfer import linear_layers_of


def restore(student: PreTrainedModel, index: int) -> None:
    """Give layer `index` softmax attention on the projections that its linear attention has; nothing is copied.

    Raises:
        ValueError: the layer has a short convolution, which softmax attention has no place for.
    """
    linear = student.model.layers[index].self_attn
    if linear.q_conv is not None:
        raise ValueError(f"layer {index} has a short convolution, which full attention has no place for")
    types = list(student.config.layer_types)
    types[index] = "full_attention"
    student.config.layer_types = types
    full = FullAttention(student.config, index).to(linear.q_proj.weight)
    for name, _ in list(full.named_children()):
        if isinstance(getattr(linear, name, None), nn.Module):
            setattr(full, name, getattr(linear, name))
    student.model.layers[index].self_attn = full.train(linear.training)


@contextmanager
def restored(student: PreTrainedModel, index: int) -> Iterator[None]:
    """The student with the softmax attention of one layer restored."""
    types, linear = student.config.layer_types, student.model.layers[index].self_attn
    try:
        restore(student, index)
        yield
    finally:
        student.config.layer_types, student.model.layers[index].self_attn = types, linear


def rank_layers(
    student: PreTrainedModel, measure: Callable[[], float], progress: bool = True
) -> tuple[float, list[dict[str, float]]]:
    """What restoring each linear layer alone would buy.

    Args:
        measure: () -> how far the student, as it now is, is from its teacher; less is better.

    Returns:
        The distance as it is, and for each linear layer `layer`, the `distance` with it restored, and its `gain`; the
        largest gain first.
    """
    layers = linear_layers_of(student)
    now, found = measure(), []
    for index in tqdm(layers, "rank layers", unit="layer", disable=not progress):
        with restored(student, index):
            distance = measure()
        found.append({"layer": index, "distance": distance, "gain": now - distance})
    return now, sorted(found, key=lambda row: -row["gain"])
