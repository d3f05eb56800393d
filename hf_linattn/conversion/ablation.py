"""A converted model with a part of it turned off: what does each part do?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from ..layers import LinearAttention, SlidingLinearAttention
from .transfer import linear_layers_of

PARTS = {
    "window only": "of sliding layers only the softmax over the window; linear layers say nothing",
    "linear only": "of sliding layers only phi, on all keys; linear layers as they are",
    "no attention": "linear and sliding layers say nothing: what all else can do alone",
}


@contextmanager
def ablated(model: PreTrainedModel, part: str) -> Iterator[PreTrainedModel]:
    """The model with only `part`, a key of `PARTS`, of its linear and sliding layers; restored at the end.

    Layers of softmax attention are left alone. Without a cache only: a state that one part wrote is not another's.

    Raises:
        ValueError: an unknown part.
    """
    if part not in PARTS:
        raise ValueError(f"part={part!r} is unknown; choose one of {list(PARTS)}")
    with ExitStack() as stack:
        for index in linear_layers_of(model):
            attention = model.model.layers[index].self_attn
            is_sliding = isinstance(attention, SlidingLinearAttention)
            if part == "linear only" and not is_sliding:
                continue
            if part == "no attention" or not is_sliding:
                hook = attention.register_forward_hook(_say_nothing)
                stack.callback(hook.remove)
            else:
                stack.callback(setattr, attention, "only", attention.only)
                attention.only = part.removesuffix(" only")
        yield model


def _say_nothing(module: LinearAttention, args: tuple, out: tuple[Tensor, Tensor | None]) -> tuple:
    return out[0].new_zeros(out[0].shape), *out[1:]
