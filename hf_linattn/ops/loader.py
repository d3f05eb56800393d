"""The loader: reads a block as features and values into a frame, and writes gradients the same way back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .blocks import Block, Frame, Shape, frame_of
from .feature_maps import FeatureMap


def map_parameters(feature_map: FeatureMap | None) -> dict[str, Tensor]:
    """The parameters that a gradient may have to reach, by name."""
    return {} if feature_map is None else dict(feature_map.named_parameters())


class Loader:
    """phi(q), phi(k) and hat v = [v, 1] of a block in the dtype of the sums; masked keys are 0 in both.

    A map without parameters whose `forward` serves queries and keys alike writes straight into the frame. Any other
    map is called on the block in its own layout. Either is called again in the backward, so that no features are
    kept.

    Args:
        parameters: the map's parameters, by name, as they were in the forward.
        hidden: [B, S], true where a key is masked.
        features: F.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        feature_map: FeatureMap | None,
        parameters: dict[str, Tensor],
        hidden: Tensor | None,
        features: int,
        dtype: torch.dtype,
    ):
        self.q, self.k, self.v = q, k, v
        self.feature_map, self.parameters, self.hidden = feature_map, parameters, hidden
        self.features, self.dtype = features, dtype
        self.heads = k.shape[2]
        self.group = q.shape[2] // self.heads
        self.is_direct = feature_map is None or feature_map.is_one_function

    def frame(self, block: Block) -> Frame:
        """The buffers for blocks of this size; what they held before is lost."""
        batch, values, device = self.q.shape[0], self.v.shape[-1], self.q.device
        sizes = (block.chunks, batch, self.heads, self.group, block.size, self.features, values)
        return frame_of(Shape(*sizes, self.dtype, device))

    def open_gradients(self) -> None:
        """Allocate what `grad_query`, `grad_key` and `grad_value` write to."""
        self.grad_q, self.grad_k, self.grad_v = (torch.empty_like(x) for x in (self.q, self.k, self.v))
        self.grad_parameters = {name: torch.zeros_like(value) for name, value in self.parameters.items()}

    # reading

    def read_query(self, frame: Frame, block: Block) -> None:
        """frame.phi_q = phi(q)."""
        if self.is_direct:
            self._map_into(frame, frame.phi_q, self.view_q(self.q, block))
        else:
            frame.phi_q.copy_(self._split_q(self._map("query", self.q[:, block.tokens]), block))

    def read_key_value(self, frame: Frame, block: Block) -> None:
        """frame.phi_k = phi(k) and frame.values = [v, 1], both 0 on masked keys."""
        if self.is_direct:
            self._map_into(frame, frame.phi_k, self.view_k(self.k, block))
        else:
            frame.phi_k.copy_(self._split_k(self._map("key", self._raw_keys(block)), block))
        frame.values[..., :-1].copy_(self.view_k(self.v, block))
        if frame.ones_are_masked:
            frame.values[..., -1] = 1
        frame.ones_are_masked = self.hidden is not None
        self.mask(frame.phi_k, block)
        self.mask(frame.values, block)

    def read_grad_sums(
        self, frame: Frame, block: Block, grad_out: Tensor, out: Tensor, denominator: Tensor | None
    ) -> None:
        """frame.sums = d hat n = [dout / den, -(dout . out) / den]; [dout, 0] without a denominator."""
        numerator, total = frame.numerator, frame.denominator
        source = self.view_q(grad_out, block)
        if denominator is None:
            numerator.copy_(source)
            total.zero_()
            return
        torch.div(source.to(self.dtype), self.view_q(denominator, block), out=numerator)
        product = torch.mul(numerator, self.view_q(out, block), out=frame.scratch_like(source))
        torch.sum(product, -1, keepdim=True, out=total).neg_()

    # writing

    def grad_query(self, frame: Frame, block: Block, grad: Tensor) -> None:
        """Pull `grad`, with respect to phi(q) [N, G C, F], back to q."""
        grad = grad.view(frame.phi_q.shape)
        target = self.view_q(self.grad_q, block)
        if self.is_direct:
            target.copy_(self._vjp_direct(self.view_q(self.q, block), frame.phi_q, grad))
        else:
            raw = self.q[:, block.tokens]
            target.copy_(self._split_q(self._vjp("query", raw, grad, self._split_q, block), block))

    def grad_key(self, frame: Frame, block: Block, grad: Tensor) -> None:
        """Pull `grad`, with respect to phi(k) [N, C, F], back to k."""
        grad = self.mask(grad.view(frame.phi_k.shape), block)
        if self.is_direct:
            grad = self._vjp_direct(self.view_k(self.k, block), frame.phi_k, grad)
        else:
            grad = self._split_k(self._vjp("key", self._raw_keys(block), grad, self._split_k, block), block)
        self.view_k(self.grad_k, block).copy_(self.mask(grad, block))

    def grad_value(self, frame: Frame, block: Block, grad: Tensor) -> None:
        """Write the gradient of v, [N, C, E]."""
        grad = grad.view(*frame.phi_k.shape[:-1], -1)
        self.view_k(self.grad_v, block).copy_(self.mask(grad, block))

    # views

    def view_q(self, x: Tensor, block: Block) -> Tensor:
        """The block of any [B, T, Hq, X], as a view: [n, B, Hk, G, C, X]."""
        return self._split_q(x[:, block.tokens], block)

    def view_k(self, x: Tensor, block: Block) -> Tensor:
        """The block of any [B, S, Hk, X], as a view: [n, B, Hk, C, X]."""
        return self._split_k(x[:, block.tokens], block)

    def mask(self, x: Tensor, block: Block) -> Tensor:
        """Put 0 on masked keys of [n, B, Hk, C, X], in place; replacing, so that NaN goes too."""
        if self.hidden is None:
            return x
        hidden = self.hidden[:, block.tokens].unflatten(1, (block.chunks, block.size)).transpose(0, 1)
        return x.masked_fill_(hidden[:, :, None, :, None], 0)

    def _split_q(self, x: Tensor, block: Block) -> Tensor:
        sizes = (x.shape[0], block.chunks, block.size, self.heads, self.group, x.shape[-1])
        return x.view(sizes).permute(1, 0, 3, 4, 2, 5)

    def _split_k(self, x: Tensor, block: Block) -> Tensor:
        sizes = (x.shape[0], block.chunks, block.size, self.heads, x.shape[-1])
        return x.view(sizes).permute(1, 0, 3, 2, 4)

    # maps

    def _raw_keys(self, block: Block) -> Tensor:
        """Keys before phi; a masked one is 0, so that its content cannot reach a parameter's gradient."""
        keys = self.k[:, block.tokens]
        return keys if self.hidden is None else keys.masked_fill(self.hidden[:, block.tokens, None, None], 0)

    def _map(self, side: str, raw: Tensor) -> Tensor:
        """phi by a map of any kind, with the parameters of the forward: sharded ones look otherwise in the backward."""
        if not self.parameters:
            return getattr(self.feature_map, side)(raw)
        return functional_call(_Side(self.feature_map), _prefixed(self.parameters), (raw, side))

    def _map_into(self, frame: Frame, out: Tensor, source: Tensor) -> None:
        if self.feature_map is None:
            out.copy_(source)
        else:
            self.feature_map.map_into(out, source.to(self.dtype), frame.scratch_like(source))

    def _vjp_direct(self, source: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
        return grad if self.feature_map is None else self.feature_map.vjp(source.to(self.dtype), phi, grad)

    def _vjp(self, side: str, raw: Tensor, grad: Tensor, split, block: Block) -> Tensor:
        """Gradient at `raw` [B, T, heads, D]; the parameters' gradients are added up."""
        with torch.enable_grad():
            raw = raw.detach().requires_grad_()
            parameters = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
            phi = functional_call(_Side(self.feature_map), _prefixed(parameters), (raw, side))
        grad_phi = torch.empty_like(phi, memory_format=torch.contiguous_format)
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
