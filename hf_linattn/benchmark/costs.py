"""What attention layers and whole decoders cost, by counting: bytes and operations as functions of the context.

An operation is an addition or a multiplication of a matrix product, so that a product of [n, k] and [k, m] counts
2 n k m (the count of `torch.utils.flop_counter`); the update of mu and nu is such a product too. Norms, activations,
rotations, exponentials, short convolutions and the optimiser are not counted.
Letters as in ops/state.py: B batch, T tokens, Hq query heads, Hk key heads, D head dim, F feature dim, E = D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..cache import LINEAR_LAYER_TYPE, SLIDING_LAYER_TYPE
from ..layers import LinearAttention, SlidingLinearAttention
from ..models import LinAttnConfig
from ..ops import make_feature_map
from ..ops.blocks import Block, Frame, Shape, cut
from ..ops.sliding.chunk import chunk_length


class SoftmaxLayer(NamedTuple):
    """Causal softmax attention by a kernel that forms no [T, T] matrix and skips hidden keys."""

    heads: int
    key_heads: int
    head_dim: int
    window: int | None = None  # keys a query sees, itself included; `None` is all

    parameters = 0  # beyond the projections

    def pairs(self, tokens: int) -> int:
        """Query-key pairs that are visible: sum_i min(i, window)."""
        seen = tokens if self.window is None else min(tokens, self.window)
        return seen * (seen + 1) // 2 + (tokens - seen) * seen

    def cache_bytes(self, batch: int, context: int, itemsize: int) -> int:
        """Keys and values of the tokens that a later one can see: 2 B Hk D tokens."""
        kept = context if self.window is None else min(context, self.window - 1)
        return 2 * batch * self.key_heads * self.head_dim * kept * itemsize

    def decode_bytes(self, batch: int, context: int, itemsize: int) -> int:
        """Read the cache, write one key and value."""
        one = 2 * batch * self.key_heads * self.head_dim * itemsize
        return self.cache_bytes(batch, context, itemsize) + one

    def decode_flops(self, batch: int, context: int) -> int:
        return self.prefill_flops(batch, context + 1) - self.prefill_flops(batch, context)

    def prefill_flops(self, batch: int, tokens: int) -> int:
        """q k^T and the sum of v: 4 B Hq D pairs."""
        return 4 * batch * self.heads * self.head_dim * self.pairs(tokens)

    def training_flops(self, batch: int, tokens: int) -> int:
        """Two products forward, five backward (q k^T is computed again): 14 B Hq D pairs."""
        return 14 * batch * self.heads * self.head_dim * self.pairs(tokens)

    def attention_bytes(self, batch: int, tokens: int, itemsize: int, device: torch.device) -> int:
        """q, k, v, out, their gradients, and per query the log of the denominator and dout . out in float32.

        A lower bound: the tiles that a kernel works on, which differ from kernel to kernel, are left out.
        """
        tensors = 4 * batch * tokens * (self.heads + self.key_heads) * self.head_dim * itemsize
        return tensors + 2 * 4 * batch * tokens * self.heads


class LinearLayer(NamedTuple):
    """Causal linear attention: the chunk form for many tokens, the recurrent form for one."""

    heads: int
    key_heads: int
    head_dim: int
    feature_dim: int
    normalize: bool
    state_bytes: int  # of one row
    map_flops: int  # of one token, queries and keys
    map_backward_flops: int
    parameters: int  # beyond the projections
    takes_features: bool  # mapped before the attention function, as maps of positions are

    @classmethod
    def of(cls, config: LinAttnConfig, dtype: torch.dtype) -> LinearLayer:
        """A linear layer of `config` in a model of `dtype`."""
        one = _one_layer(config, layer_types=[LINEAR_LAYER_TYPE], sliding_window=None)
        with torch.device("meta"):
            layer = LinearAttention(one, 0)
        return cls(
            one.num_attention_heads,
            one.num_key_value_heads,
            one.head_dim,
            one.feature_dim,
            one.normalizer == "denominator",
            one.state_nbytes(1, dtype),
            *_map_flops(one),
            sum(parameter.numel() for parameter in linear_parameters(layer)),
            layer.feature_map.uses_positions,
        )

    def cache_bytes(self, batch: int, context: int, itemsize: int) -> int:
        """mu, nu and convolution tails, at any length."""
        return batch * self.state_bytes

    def decode_bytes(self, batch: int, context: int, itemsize: int) -> int:
        """Read the state and write it."""
        return 2 * batch * self.state_bytes

    def decode_flops(self, batch: int, context: int) -> int:
        """Add phi(k)^T [v, 1], read phi(q) [mu, nu]: 2 B F (E + 1) (Hk + Hq), and the map."""
        columns = self.head_dim + 1
        read = self.head_dim + self.normalize
        sums = 2 * self.feature_dim * (self.key_heads * columns + self.heads * read)
        return batch * (sums + self.map_flops)

    def prefill_flops(self, batch: int, tokens: int) -> int:
        if tokens == 1:  # the recurrent form
            return self.decode_flops(batch, 0)
        return batch * (self._by_chunk(tokens, self._chunk_forward) + tokens * self.map_flops)

    def training_flops(self, batch: int, tokens: int) -> int:
        chunks = self._by_chunk(tokens, self._chunk_forward) + self._by_chunk(tokens, self._chunk_backward)
        if tokens <= _chunk_size(self.feature_dim * self.head_dim):  # a lone chunk, which computes no states
            chunks = self._lone_forward(tokens) + self._lone_backward(tokens)
        return batch * (chunks + tokens * (self.map_flops + self.map_backward_flops))

    def attention_bytes(self, batch: int, tokens: int, itemsize: int, device: torch.device) -> int:
        """q, k, v, out, their gradients, denominators, the state before each block, and the buffers of blocks.

        Left out are temporaries of the map: for elu1 one tensor of the features of a block, for maps with parameters
        their graph of one block.
        """
        of_values = self.head_dim * itemsize
        of_keys = 4 * self.feature_dim if self.takes_features else of_values
        tensors = 2 * batch * tokens * (self.heads + self.key_heads) * (of_keys + of_values)
        denominators = 4 * batch * tokens * self.heads * self.normalize
        state = 4 * batch * self.key_heads * self.feature_dim * (self.head_dim + 1)
        blocks = cut(tokens, batch * self.heads, self.feature_dim * self.head_dim, None, device)
        sizes = {(block.chunks, block.size): block for block in blocks}  # at most three: whole blocks, a rest, a tail
        buffers = sum(self._buffer_bytes(batch, block) for block in sizes.values())
        return tensors + denominators + (len(blocks) + 2) * state + buffers

    def _buffer_bytes(self, batch: int, block: Block) -> int:
        """Bytes of the frame that forward and backward of a block compute in."""
        sizes = (block.chunks, batch, self.key_heads, self.heads // self.key_heads, block.size)
        frame = Frame(Shape(*sizes, self.feature_dim, self.head_dim, torch.float32, torch.device("meta")))
        for name in ("grad_weights", "grad_q", "grad_k", "grad_v", "grad_states"):
            getattr(frame, name)  # made on first use
        for source in (frame.numerator, frame.denominator, frame.values[..., :-1]):
            frame.scratch_like(source)
        return frame.nbytes

    def _by_chunk(self, tokens: int, flops: Callable[[int], int]) -> int:
        size = _chunk_size(self.feature_dim * self.head_dim)
        return tokens // size * flops(size) + flops(tokens % size)

    def _chunk_forward(self, size: int) -> int:
        """The products of `CausalChunk.forward` on one chunk of C tokens."""
        states = self.feature_dim * (self.head_dim + 1)  # phi(K)^T hat V, phi(Q) hat mu
        return self._lone_forward(size) + 2 * size * (self.key_heads + self.heads) * states

    def _chunk_backward(self, size: int) -> int:
        """The products of `CausalChunk.backward` on one chunk of C tokens."""
        features, values = self.feature_dim, self.head_dim
        keys = 2 * features * (values + 1) + features * values  # states again, hat V R^T, phi(K) R
        queries = 2 * features * (values + 1)  # d hat n mu^T and phi(Q)^T d hat n
        return self._lone_backward(size) + 2 * size * (self.key_heads * keys + self.heads * queries)

    def _lone_forward(self, size: int) -> int:
        """The products within a chunk: A, A hat V."""
        return 2 * size * size * self.heads * (self.feature_dim + self.head_dim + 1)

    def _lone_backward(self, size: int) -> int:
        """The products within a chunk: A again, dA, its share of dphi(Q), dphi(K) and dV."""
        return 2 * size * size * self.heads * (3 * self.feature_dim + 2 * self.head_dim + 1)


class SlidingLayer(NamedTuple):
    """Softmax over a window of keys and linear attention over older ones: the chunk form, and the recurrent for one."""

    linear: LinearLayer  # a layer of the same shape without a window
    window: int
    state_bytes: int  # of one row
    parameters: int  # beyond the projections

    @classmethod
    def of(cls, config: LinAttnConfig, dtype: torch.dtype) -> SlidingLayer:
        """A sliding layer of `config` in a model of `dtype`."""
        one = _one_layer(config, layer_types=[SLIDING_LAYER_TYPE])
        linear = LinearLayer.of(config, dtype)
        return cls(linear, one.sliding_window, one.state_nbytes(1, dtype), linear.parameters + linear.heads)

    @property
    def _older(self) -> LinearLayer:
        """The part over older keys of many tokens, whose values have a column of ones for the denominator."""
        return self.linear._replace(head_dim=self.linear.head_dim + 1, normalize=False)

    def cache_bytes(self, batch: int, context: int, itemsize: int) -> int:
        """mu, nu, the window and convolution tails, at any length."""
        return batch * self.state_bytes

    def decode_bytes(self, batch: int, context: int, itemsize: int) -> int:
        """Read the state and write it: a window moves by one key."""
        return 2 * batch * self.state_bytes

    def decode_flops(self, batch: int, context: int) -> int:
        """A step of linear attention, and W keys and values: 4 B Hq D W."""
        return self.linear.decode_flops(batch, context) + self._products(batch, self.window)

    def prefill_flops(self, batch: int, tokens: int) -> int:
        if tokens == 1:  # the recurrent form
            return self.decode_flops(batch, 0)
        return self._older.prefill_flops(batch, tokens) + self._products(batch, self._pairs(tokens))

    def training_flops(self, batch: int, tokens: int) -> int:
        """In the window two products forward, six backward, of which two are computed again."""
        older = self._older.training_flops(batch, tokens)
        return older + 4 * self._products(batch, self._pairs(tokens))

    def attention_bytes(self, batch: int, tokens: int, itemsize: int, device: torch.device) -> int:
        """As for a linear layer, and keys and values beside the window's, and three times numerator and denominator.

        A lower bound: the weights of a block of the window are left out.
        """
        linear = self.linear
        older = self._older.attention_bytes(batch, tokens, itemsize, device)
        lined_up = 2 * batch * (tokens + self.window) * linear.key_heads * linear.head_dim * itemsize
        sums = 4 * batch * tokens * linear.heads * (linear.head_dim + 1)
        return older + lined_up + 3 * sums

    def _pairs(self, tokens: int) -> int:
        """Products of a query and a key: C (C + W - 1) in a chunk of C queries."""
        size = min(chunk_length(self.window), tokens)
        rest = tokens % size
        return tokens // size * size * (size + self.window - 1) + rest * (rest + self.window - 1)

    def _products(self, batch: int, pairs: int) -> int:
        """q k^T and the sum of v."""
        return 4 * batch * self.linear.heads * self.linear.head_dim * pairs


Layer = SoftmaxLayer | LinearLayer | SlidingLayer


def _one_layer(config: LinAttnConfig, **changes) -> LinAttnConfig:
    return LinAttnConfig(**config.to_dict() | {"num_hidden_layers": 1} | changes)


@lru_cache
def _chunk_size(state_size: int) -> int:
    """C, which the chunk form picks by the size of the state; the device decides only how chunks are grouped."""
    return cut(1 << 16, 1, state_size, None, torch.device("cpu"))[0].size


@torch.inference_mode(False)
def _map_flops(config: LinAttnConfig) -> tuple[int, int]:
    """(forward, backward) operations of the map on one token, counted while it runs, so for any registered map.

    The backward of the chunk form maps again for its sums; a map with a graph of its own once more for that. A map of
    positions is applied before, once.
    """
    heads = (config.num_attention_heads, config.num_key_value_heads)
    with torch.random.fork_rng(devices=[]):  # building a map draws its parameters
        feature_map = make_feature_map(config.feature_map, config.head_dim, *heads, **(config.feature_map_kwargs or {}))
    inputs = [torch.zeros(1, 1, count, config.head_dim, requires_grad=True) for count in heads]
    place = [torch.zeros(1, 1, dtype=torch.long)] if feature_map.uses_positions else []
    with FlopCounterMode(display=False) as forward:
        features = [side(x, *place) for side, x in zip((feature_map.query, feature_map.key), inputs)]
    # which maps the chunk form differentiates by their own graph: see ops/loader.py
    parameters = list(feature_map.parameters())
    has_graph = not feature_map.is_one_function
    with FlopCounterMode(display=False) as backward:
        for phi, x in zip(features, inputs):
            if has_graph:
                torch.autograd.grad(phi, [x, *parameters], torch.ones_like(phi), allow_unused=True)
            else:
                feature_map.vjp(x.detach(), phi.detach(), torch.ones_like(phi))
    again = 0 if feature_map.uses_positions else 2 if has_graph else 1
    return forward.get_total_flops(), again * forward.get_total_flops() + backward.get_total_flops()


def linear_parameters(layer: LinearAttention) -> list[nn.Parameter]:
    """The parameters that softmax attention of the same shape has not: map, convolutions, output norm, window mix."""
    parts = (layer.feature_map, layer.q_conv, layer.k_conv, layer.v_conv, layer.o_norm)
    own = [layer.window_mix] if isinstance(layer, SlidingLinearAttention) else []
    return own + [parameter for part in parts if part is not None for parameter in part.parameters()]


class Weights(NamedTuple):
    """Counts of parameters outside of what only linear attention has."""

    products: int  # multiplied with every token
    head: int  # of the output head, multiplied where logits are wanted
    other: int  # norms, biases, scales
    tables: int  # embeddings; without one that the head shares
    rows: int  # what a token reads of all embeddings

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Count `model`, which may be without storage."""
        left_out = {id(p) for m in model.modules() if isinstance(m, LinearAttention) for p in linear_parameters(m)}
        embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        head = model.get_output_embeddings().weight
        left_out |= {id(weight) for weight in (*embeddings, head)}
        body = [parameter for parameter in model.parameters() if id(parameter) not in left_out]
        products = sum(parameter.numel() for parameter in body if parameter.dim() > 1)
        return cls(
            products,
            head.numel(),
            sum(parameter.numel() for parameter in body) - products,
            sum(weight.numel() for weight in embeddings if weight is not head),
            sum(weight.shape[-1] for weight in embeddings),
        )


@dataclass(frozen=True)
class Decoder:
    """A decoder as its cost: weights, and how many layers there are of each attention.

    Args:
        layers: number of layers, by attention.
        batch: B, rows.
        itemsize: bytes of a parameter, an activation, a key or a value.
        device: where it would train; the chunk form takes more tokens at once on a GPU.
    """

    weights: Weights
    layers: Mapping[Layer, int]
    batch: int
    itemsize: int
    device: torch.device

    @property
    def parameters(self) -> int:
        weights = self.weights
        own = weights.products + weights.head + weights.other + weights.tables
        return own + self._sum(lambda layer: layer.parameters)

    def cache_bytes(self, context: int) -> int:
        """Bytes of the cache after `context` tokens a row."""
        return self._sum(lambda layer: layer.cache_bytes(self.batch, context, self.itemsize))

    def decode_bytes(self, context: int) -> int:
        """Bytes read and written by a step that decodes one token a row after `context` tokens: weights and cache."""
        read = self.parameters - self.weights.tables + self.batch * self.weights.rows
        return read * self.itemsize + self._sum(lambda layer: layer.decode_bytes(self.batch, context, self.itemsize))

    def decode_flops(self, context: int) -> int:
        """Operations of that step."""
        products = 2 * self.batch * (self.weights.products + self.weights.head)
        return products + self._sum(lambda layer: layer.decode_flops(self.batch, context))

    def prefill_flops(self, context: int) -> int:
        """Operations of reading `context` tokens a row, with logits of the last."""
        products = 2 * self.batch * (context * self.weights.products + self.weights.head)
        return products + self._sum(lambda layer: layer.prefill_flops(self.batch, context))

    def training_flops(self, context: int) -> int:
        """Operations of forward and backward over `context` tokens a row, with logits of all."""
        products = 6 * self.batch * context * (self.weights.products + self.weights.head)
        return products + self._sum(lambda layer: layer.training_flops(self.batch, context))

    def attention_bytes(self, context: int) -> int:
        """Peak bytes of forward and backward of the attention function in one layer, the largest there is."""
        return max(layer.attention_bytes(self.batch, context, self.itemsize, self.device) for layer in self.layers)

    def _sum(self, cost: Callable[[Layer], int]) -> int:
        return sum(count * cost(layer) for layer, count in self.layers.items())
