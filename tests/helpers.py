"""Tiny models in which nothing is left at its start value, and what tests read from them.

Equivalences are checked on float64 models to `EXACT`: RMSNorm works in float32 even there, and a value on the edge of
two float32 numbers may round either way, which is 1e-7. The float32 promises (logits 1e-5 of their scale, states 1e-6)
are checked beside them.
"""

import string
from functools import lru_cache

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_linattn import LinAttnConfig, LinAttnForCausalLM, LinearAttentionCache

LINEAR, FULL, SLIDING = "kernel_linear_attention", "full_attention", "kernel_linear_attention_sliding"
VOCAB = 29
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
HYBRID = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
WINDOW = {"layer_types": [SLIDING] * 2, "sliding_window": 3}

# What a config may ask for; every general property is checked under each.
CONFIGS = {
    "linear": {},
    "conv": {"conv_kernel_size": 4},
    "hybrid": HYBRID,
    "gqa": GROUPED,
    "qk_norm": {"qk_norm": True, "attention_bias": True, "attention_out_bias": False},
    "rmsnorm": {"normalizer": "rmsnorm", "feature_map": "identity"},
    "no_rope": {"rope_position": "none"},
    "hedgehog_key": {**GROUPED, "feature_map": "hedgehog", "feature_map_kwargs": {"query_heads": "key"}},
    "hedgehog_query": {**GROUPED, "feature_map": "hedgehog", "feature_map_kwargs": {"query_heads": "query"}},
    "hedgehog_tied": {**GROUPED, "feature_map": "hedgehog", "feature_map_kwargs": {"tied": True}},
    "taylor2": {"feature_map": "taylor2", "head_dim": 4},
    "sliding": {**GROUPED, **WINDOW},
    "sliding_hybrid": {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 3},
    "favor": {**GROUPED, "feature_map": "favor", "feature_map_kwargs": {"num_features": 9, "seed": 3}},
    "cosformer": {"feature_map": "cosformer", "feature_map_kwargs": {"horizon": 300}, "max_position_embeddings": 300},
}
EXACT = 1e-7
FEW = ("linear", "conv", "hybrid", "rmsnorm", "hedgehog_query", "sliding")  # where a property depends on little else


def make_config(name: str = "linear", **changes) -> LinAttnConfig:
    return LinAttnConfig.from_preset("seed", **{**SIZES, **CONFIGS[name], **changes})


def make_model(name: str = "linear", cls=LinAttnForCausalLM, attn_implementation=None, **changes):
    """A model in eval mode, the same at every call, with every norm, bias, filter and feature map off its start."""
    return fill(cls._from_config(make_config(name, **changes), attn_implementation=attn_implementation))


def fill(model, seed=0):
    """Move all parameters that start at a constant away from it."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=g)
            starts_constant = any(part in parameter_name for part in ("norm", "conv", "feature_map", "bias", "mix"))
            parameter.copy_(parameter + noise if starts_constant else noise)
    return model.eval()


def make_llama(attn_implementation=None, **changes) -> LlamaForCausalLM:
    """A Llama of the same sizes, for what any causal model of transformers does."""
    torch.manual_seed(0)
    return fill(
        LlamaForCausalLM._from_config(LlamaConfig(**{**SIZES, **changes}), attn_implementation=attn_implementation)
    )


@lru_cache
def shared_model(name: str = "linear", dtype=torch.float64, attn_implementation=None):
    """`make_model` once per config and dtype, for tests that leave the model as it is."""
    return make_model(name, attn_implementation=attn_implementation).to(dtype)


class OrderedTokenizer(PreTrainedTokenizerFast):
    """A vocabulary in the order of its ids: transformers assigns the logits of a draft to tokens by this order, and
    that of the fast tokenizers changes from process to process."""

    def get_vocab(self):
        return dict(sorted(super().get_vocab().items(), key=lambda item: item[1]))


LETTERS = [*string.ascii_lowercase, " ", "-"]  # with <pad>, VOCAB pieces


def tokenizer_of(pieces=LETTERS, merges=(), **options) -> OrderedTokenizer:
    """Token 0 pads, the others are `pieces` in this order, joined where a merge allows it."""
    vocab = {piece: index for index, piece in enumerate(["<pad>", *pieces])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.decoder = decoders.Fuse()
    options = {"pad_token": "<pad>", "padding_side": "left", "clean_up_tokenization_spaces": False, **options}
    return OrderedTokenizer(tokenizer_object=backend, **options)


def merging_tokenizer() -> OrderedTokenizer:
    """The same letters in another order, and some pairs of them."""
    merges = [("a", "b"), ("e", "n"), ("q", "u"), ("t", "h")]
    return tokenizer_of([*reversed(LETTERS), *map("".join, merges)], merges)


def random_ids(rows: int, length: int, seed: int = 0, low: int = 1) -> Tensor:
    """Ids that are never padding."""
    return torch.randint(low, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(model, ids: Tensor, lengths, mask: Tensor | None = None, cache=None, whole: bool = True):
    """Feed `ids` in calls of `lengths` tokens; the logits of all calls, and the cache.

    `whole` passes the mask of everything read so far, as generate() does; otherwise only that of the new tokens.
    """
    cache = LinearAttentionCache(model.config) if cache is None else cache
    logits, end = [], cache.get_seq_length()
    offset = int(end)
    for length in lengths:
        start, end = int(end), int(end) + length
        part = None if mask is None else mask[:, 0 if whole else start : end]
        out = model(ids[:, start - offset : end - offset], attention_mask=part, cache=cache)
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


def states(cache) -> list[Tensor]:
    """mu, nu, windows and convolution tails of every linear or sliding layer."""
    found = []
    for layer in cache.layers:
        if hasattr(layer, "mu"):
            found += [layer.mu, layer.nu, *(layer.state or ())[2:], *layer.conv_tails]
    return found


def contents(cache) -> list[Tensor]:
    """Copies of everything a cache holds, for comparing before and after."""
    found = [torch.as_tensor(cache.get_seq_length()).clone()]
    for layer in cache.layers:
        names = ("mu", "nu", "padding", "keys", "values", "cumulative_length")
        tensors = [getattr(layer, name, None) for name in names] + list(getattr(layer, "conv_tails", ()))
        tensors += (getattr(layer, "state", None) or ())[2:]
        found += [tensor.detach().clone() for tensor in tensors if isinstance(tensor, Tensor)]
    return found


def assert_same_bits(actual, expected, what=""):
    assert len(actual) == len(expected), what
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (e is None), f"{what}[{index}]"
        assert a is None or torch.equal(a, e), f"{what}[{index}] differs by {(a - e).abs().max()}"


def pull_back(outputs, inputs, seed: int = 0) -> list[Tensor]:
    """Gradients of sum(c * output), c Gaussian and fixed by the seed; zeros where none flows."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda output: torch.randn(output.shape, generator=g).to(output.dtype)  # noqa: E731
    loss = sum((draw(output) * output).sum() for output in outputs)
    inputs = list(inputs)
    grads = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else [None] * len(inputs)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


def drift(actual, expected) -> float:
    """|actual - expected| / |expected|, of lists of tensors taken as one long vector."""
    actual, expected = (torch.cat([tensor.detach().double().flatten() for tensor in x]) for x in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()
