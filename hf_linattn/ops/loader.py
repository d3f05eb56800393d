"""The loader: reads a block as features and values, heads before time, and writes gradients the same way back.

Inside a block, queries are [B, Hk, n, G, C, X] and keys and values [B, Hk, n, C, X], for n chunks of C tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .blocks import Block, Workspace, as_rows
from .feature_maps import FeatureMap


def map_parameters(feature_map: FeatureMap | None) -> dict[str, Tensor]:
    """The parameters that a gradient may have to reach, by name."""
    return {} if feature_map is None else dict(feature_map.named_parameters())


class Loader:
    """phi(q), phi(k) and hat v = [v, 1] of a block in the dtype of the sums; masked keys are 0 in both.

    A map without parameters whose `forward` serves queries and keys alike works in place on the block. Any other map
    is called on the block in its own layout. Either is called again in the backward, so that no features are kept.

    Args:
        parameters: the map's parameters, by name, as they were in the forward.
        hidden: [B, S], true where a key is masked.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        feature_map: FeatureMap | None,
        parameters: dict[str, Tensor],
        hidden: Tensor | None,
        dtype: torch.dtype,
    ):
        self.q, self.k, self.v = q, k, v
        self.feature_map, self.parameters, self.hidden, self.dtype = feature_map, parameters, hidden, dtype
        self.heads = k.shape[2]
        self.group = q.shape[2] // self.heads
        self.space = Workspace.current(dtype, q.device)
        kind = type(feature_map)
        self.in_place = (
            feature_map is not None and not parameters and kind.query is FeatureMap.query and kind.key is FeatureMap.key
        )

    def open_gradients(self) -> None:
        """Allocate what `grad_query`, `grad_key` and `grad_value` write to."""
        self.grad_q, self.grad_k, self.grad_v = (torch.empty_like(x) for x in (self.q, self.k, self.v))
        self.grad_parameters = {name: torch.zeros_like(value) for name, value in self.parameters.items()}

    # reading

    def query(self, block: Block) -> Tensor:
        """phi(q): [B, Hk, n, G, C, F]."""
        if self.feature_map is None or self.in_place:
            return self._map_in_place("phi_q", self.view_q(self.q, block))
        phi = self.feature_map.query(self.q[:, block.tokens])
        return self._copy("phi_q", self._split_q(phi, block))

    def key(self, block: Block) -> Tensor:
        """phi(k): [B, Hk, n, C, F]."""
        if self.feature_map is None or self.in_place:
            phi = self._map_in_place("phi_k", self.view_k(self.k, block))
        else:
            phi = self._copy("phi_k", self._split_k(self.feature_map.key(self._raw_keys(block)), block))
        return self.mask(phi, block)

    def value(self, block: Block) -> Tensor:
        """hat v: [B, Hk, n, C, E + 1]."""
        source = self.view_k(self.v, block)
        buffer = self.space.get("values", (*source.shape[:-1], source.shape[-1] + 1))
        buffer[..., :-1].copy_(source)
        buffer[..., -1] = 1
        return self.mask(buffer, block)

    def grad_sums(self, block: Block, grad_out: Tensor, out: Tensor, denominator: Tensor | None) -> Tensor:
        """d hat n = [dout / den, -(dout . out) / den]: [B, Hk, n, G C, E + 1]; without a denominator, [dout, 0]."""
        source = self.view_q(grad_out, block)
        buffer = self.space.get("grad_sums", (*source.shape[:-1], source.shape[-1] + 1))
        numerator, total = buffer[..., :-1], buffer[..., -1:]
        if denominator is None:
            numerator.copy_(source)
            total.zero_()
        else:
            torch.div(source.to(buffer.dtype), self.view_q(denominator, block), out=numerator)
            torch.sum(numerator * self.view_q(out, block), -1, keepdim=True, out=total).neg_()
        return as_rows(buffer)

    # writing

    def grad_query(self, block: Block, phi: Tensor, grad: Tensor) -> None:
        """Pull `grad`, with respect to phi(q) [B, Hk, n, G, C, F], back to q."""
        target = self.view_q(self.grad_q, block)
        if self.feature_map is None or self.in_place:
            target.copy_(self._vjp_in_place(self.view_q(self.q, block), phi, grad))
        else:
            raw = self.q[:, block.tokens]
            target.copy_(self._split_q(self._vjp("query", raw, grad, self._split_q, block), block))

    def grad_key(self, block: Block, phi: Tensor, grad: Tensor) -> None:
        """Pull `grad`, with respect to phi(k) [B, Hk, n, C, F], back to k."""
        grad = self.mask(grad, block)
        if self.feature_map is None or self.in_place:
            grad = self._vjp_in_place(self.view_k(self.k, block), phi, grad)
        else:
            grad = self._split_k(self._vjp("key", self._raw_keys(block), grad, self._split_k, block), block)
        self.view_k(self.grad_k, block).copy_(self.mask(grad, block))

    def grad_value(self, block: Block, grad: Tensor) -> None:
        """Write the gradient of v, [B, Hk, n, C, E]."""
        self.view_k(self.grad_v, block).copy_(self.mask(grad, block))

    # views

    def view_q(self, x: Tensor, block: Block) -> Tensor:
        """The block of any [B, T, Hq, X], as a view: [B, Hk, n, G, C, X]."""
        return self._split_q(x[:, block.tokens], block)

    def view_k(self, x: Tensor, block: Block) -> Tensor:
        """The block of any [B, S, Hk, X], as a view: [B, Hk, n, C, X]."""
        return self._split_k(x[:, block.tokens], block)

    def mask(self, x: Tensor, block: Block) -> Tensor:
        """Put 0 on masked keys of [B, Hk, n, C, X], in place; replacing, so that NaN goes too."""
        if self.hidden is None:
            return x
        hidden = self.hidden[:, block.tokens].unflatten(1, (block.chunks, block.size))
        return x.masked_fill_(hidden[:, None, ..., None], 0)

    def _split_q(self, x: Tensor, block: Block) -> Tensor:
        x = x.unflatten(1, (block.chunks, block.size)).unflatten(3, (self.heads, self.group))
        return x.permute(0, 3, 1, 4, 2, 5)

    def _split_k(self, x: Tensor, block: Block) -> Tensor:
        return x.unflatten(1, (block.chunks, block.size)).permute(0, 3, 1, 2, 4)

    # maps

    def _raw_keys(self, block: Block) -> Tensor:
        """Keys before phi; a masked one is 0, so that its content cannot reach a parameter's gradient."""
        keys = self.k[:, block.tokens]
        return keys if self.hidden is None else keys.masked_fill(self.hidden[:, block.tokens, None, None], 0)

    def _copy(self, name: str, source: Tensor) -> Tensor:
        return self.space.get(name, source.shape).copy_(source)

    def _map_in_place(self, name: str, source: Tensor) -> Tensor:
        buffer = self._copy(name, source)
        if self.feature_map is None:
            return buffer
        return self.feature_map.block_(buffer, self.space.get("scratch", source.shape)).contiguous()

    def _vjp_in_place(self, source: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad if self.feature_map is None else self.feature_map.vjp(source.to(self.dtype), phi, grad)

    def _vjp(self, side: str, raw: Tensor, grad: Tensor, split, block: Block) -> Tensor:
        """Gradient at `raw` [B, T, heads, D]; the parameters' gradients are added up."""
        with torch.enable_grad():
            raw = raw.detach().requires_grad_()
            parameters = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
            phi = functional_call(_Side(self.feature_map), _prefixed(parameters), (raw, side))
        grad_phi = torch.empty_like(phi)
        split(grad_phi, block).copy_(grad)
        grads = torch.autograd.grad(phi, [raw, *parameters.values()], grad_phi, allow_unused=True)
        for total, part in zip(self.grad_parameters.values(), grads[1:]):
            if part is not None:
                total.add_(part)
        return grads[0]


class _Side(nn.Module):
    """Calls a map's `query` or `key` through `forward`, which is what `functional_call` calls."""

    def __init__(self, feature_map: FeatureMap):
        super().__init__()
        self.feature_map = feature_map

    def forward(self, x: Tensor, side: str) -> Tensor:
        return getattr(self.feature_map, side)(x)


def _prefixed(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"feature_map.{name}": value for name, value in parameters.items()}
