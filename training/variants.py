"""What the studies compare: feature maps, and what stands around them, in models that are otherwise the same."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from config import RunConfig
from hf_linattn import LinAttnConfig, LinAttnForCausalLM, LinearAttentionCache
from hf_linattn.ops import FEATURE_MAPS, feature_map_class
from loop import Batch, make_optimizer, make_schedule

SOFTMAX = "softmax attention"
CONV = 4  # kernel of the short convolution, as everywhere

# What can be changed beside the map, one at a time; each is measured on the maps of `CHANGED`, with a convolution.
CHANGES: dict[str, dict[str, Any]] = {
    "rope": {"rope_position": "before"},
    "qk_norm": {"qk_norm": True},
    "rmsnorm": {"normalizer": "rmsnorm"},
}
CHANGED = ("elu1", "exp", "hedgehog")
# Less room for the state, measured on every map with a convolution.
NARROW: dict[str, dict[str, Any]] = {"one head of 8": {"num_attention_heads": 1, "head_dim": 8}}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a study is; each has fields of its own beside these.

    Fields:
        heads: of every model that is not narrow; query and key heads alike.
        learning_rates: each is tried with the first of `seeds`.
        mixes: (conv, full) of the variants.
        narrow: whether there are variants with less room.
    """

    hidden_size: int
    heads: int
    layers: int
    steps: int
    batch_size: int
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    mixes: tuple[tuple[bool, bool], ...]
    initializer_range: float
    narrow: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a model reads."""
        raise NotImplementedError(f"{type(self).__name__} does not define longest")


@dataclass(frozen=True)
class Variant:
    """One model of a study.

    Fields:
        feature_map: a name of the registry; `None` is softmax attention in every layer, the reference.
        conv: a short convolution on q, k and v; it takes the place of RoPE in the linear layers.
        full: the last layer keeps softmax attention.
        change: a key of `CHANGES` or `NARROW`, or "".
    """

    feature_map: str | None
    conv: bool = False
    full: bool = False
    change: str = ""

    @property
    def name(self) -> str:
        parts = [self.feature_map or SOFTMAX, "conv" * self.conv, "full" * self.full, self.change]
        return " + ".join(part for part in parts if part)

    def fields(self, layers: int, length: int) -> dict[str, Any]:
        """Fields of `LinAttnConfig`, for so many layers and for sequences of so many tokens."""
        change = (CHANGES | NARROW).get(self.change, {})
        if self.feature_map is None:
            return {"layer_types": ["full_attention"] * layers} | change
        linear = layers - self.full
        fields: dict[str, Any] = {
            "layer_types": ["kernel_linear_attention"] * linear + ["full_attention"] * self.full,
            "feature_map": self.feature_map,
            "feature_map_kwargs": {"horizon": length} if feature_map_class(self.feature_map).uses_positions else None,
            "normalizer": "denominator" if feature_map_class(self.feature_map).is_nonnegative else "rmsnorm",
            "conv_kernel_size": CONV * self.conv,
            "qk_norm": False,
            "rope_position": "none" if self.conv else "before",
        }
        return fields | change


def all_variants(mixes: tuple[tuple[bool, bool], ...], narrow: bool) -> list[Variant]:
    """Softmax attention, every map in every mix of (conv, full), every change of some of them, and narrow ones."""
    maps = [Variant(name, conv, full) for name in FEATURE_MAPS for conv, full in mixes]
    changes = [Variant(name, conv=True, change=change) for name in CHANGED for change in CHANGES]
    narrow_ones = [Variant(name, conv=True, change=change) for name in FEATURE_MAPS for change in NARROW]
    return [Variant(None), *maps, *changes, *(narrow_ones if narrow else ())]


def new_model(scale: Scale, variant: Variant, intermediate_size: int, **fields: Any) -> LinAttnForCausalLM:
    """A model of these fields, as large as softmax attention makes it: the MLP pays for what a variant adds."""

    def build(variant: Variant, intermediate_size: int) -> LinAttnForCausalLM:
        own = variant.fields(scale.layers, scale.longest)
        config = LinAttnConfig(
            hidden_size=scale.hidden_size,
            num_hidden_layers=scale.layers,
            intermediate_size=intermediate_size,
            max_position_embeddings=scale.longest,
            initializer_range=scale.initializer_range,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            **{"num_attention_heads": scale.heads, **fields, **own},
        )
        return LinAttnForCausalLM(config)

    with torch.device("meta"):
        sizes = [build(each, intermediate_size).num_parameters() for each in (Variant(None), variant)]
    return build(variant, intermediate_size - round((sizes[1] - sizes[0]) / (3 * scale.layers * scale.hidden_size)))


def fit(
    model: torch.nn.Module,
    config: RunConfig,
    batches: Iterator[Batch],
    loss_of: Callable[[torch.nn.Module, Batch], torch.Tensor],
) -> list[tuple[int, float | None]]:
    """`max_steps` steps of AdamW; (step, loss) of some of them. A loss that is not finite is None, and the last."""
    optimizer = make_optimizer(model, config, model.device)
    schedule = make_schedule(optimizer, config)
    losses, every = [], max(1, config.max_steps // 20)
    for step in range(1, config.max_steps + 1):
        loss = loss_of(model, {name: tensor.to(model.device) for name, tensor in next(batches).items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % every == 0:
            losses.append((step, finite(loss.item())))
            if losses[-1][1] is None:
                break
    return losses


def finite(value: float) -> float | None:
    """JSON has no word for what is not finite."""
    return value if math.isfinite(value) else None


@torch.no_grad()
def cache_bytes(model: torch.nn.Module, ids: torch.Tensor) -> int:
    """Bytes that the model keeps of one sequence [1, T]: states, convolution tails, keys and values."""
    cache = LinearAttentionCache(model.config)
    model.eval()(ids, cache=cache)
    return cache.nbytes
