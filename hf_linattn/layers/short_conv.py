"""Causal depthwise convolution over the last few real tokens, before the feature map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cache import next_tail, real_first

FEW_TOKENS = 32  # a step, or the draft of one: the number of operations counts, and not their size


def is_few(length: int) -> bool:
    """Whether `length` tokens are few; a symbol of `torch.export` stands for any number, so it is not."""
    return isinstance(length, int) and length <= FEW_TOKENS


class ShortConvolution(nn.Module):
    """y_t = sum_j w_j * x_{t - K + 1 + j}, one filter per channel, over real tokens of one document.

    Starts as the identity (w_{K-1} = 1), so that adding it to a trained model changes nothing at first.
    A masked token is stepped over, wherever it stands: the taps of a token are the real tokens before it.

    Args:
        channels: C, width of the projection it follows.
        kernel_size: K, at least 2.

    Source: Mamba, arXiv:2312.00752; Based, arXiv:2402.18668, section 4.
    """

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        if kernel_size < 2:
            raise ValueError(f"kernel_size={kernel_size} must be at least 2 (0 in the config turns it off)")
        self.channels, self.kernel_size = channels, kernel_size
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        with torch.no_grad():
            self.weight.copy_(self.initial_weight())

    def initial_weight(self) -> Tensor:
        """The identity filter."""
        weight = torch.zeros(self.weight.shape, device=self.weight.device)
        weight[:, -1] = 1
        return weight

    def empty_tail(self, x: Tensor) -> Tensor:
        """The tail before the first token of the rows of `x`."""
        return x.new_zeros(x.shape[0], self.kernel_size - 1, self.channels)

    def forward(
        self,
        x: Tensor,
        tail: Tensor | None = None,
        key_mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve `x` [B, T, C].

        Args:
            tail: [B, K - 1, C], the last real inputs before these; `None` at the start of a sequence.
            key_mask: [B, T], true where the token is real.
            segments: [B, T] document numbers of a packed batch; taps do not cross documents.

        Returns:
            y [B, T, C] (undefined on masked tokens) and the new tail [B, K - 1, C].
        """
        length = x.shape[1]
        reach = self.kernel_size - 1
        if tail is None:
            tail = self.empty_tail(x)
        if length == 1:
            window = torch.cat([tail.to(x.dtype), x], 1)
            new_tail = window[:, 1:]
            if key_mask is not None:
                new_tail = torch.where(key_mask.unsqueeze(-1), new_tail, window[:, :-1])
            return (window * self.weight.t()).sum(1, keepdim=True), new_tail
        if is_few(length) and key_mask is None and segments is None:
            padded = torch.cat([tail.to(x.dtype), x], 1)
            windows = padded.unfold(1, self.kernel_size, 1)  # [B, T, C, K], at K times the memory of x
            return (windows * self.weight).sum(-1), padded[:, -reach:].clone()
        new_tail = next_tail(tail, x, key_mask)
        if key_mask is not None:
            # real tokens first, in order, so that they follow the tail without a gap
            order = real_first(key_mask)
            x = x.gather(1, order.unsqueeze(-1).expand_as(x))
            segments = None if segments is None else segments.gather(1, order)
        padded = torch.cat([tail.to(x.dtype), x], 1)  # [B, K - 1 + T, C]
        out = x * self.weight[:, reach]
        for back in range(1, self.kernel_size):
            weight = self.weight[:, reach - back]
            taps = padded[:, reach - back : reach - back + length]
            if segments is not None:
                taps = taps * _same_document(segments, back).unsqueeze(-1)
            out = torch.addcmul(out, taps, weight)
        if key_mask is None:
            return out, new_tail
        back_again = order.argsort(dim=1).unsqueeze(-1).expand_as(out)
        return out.gather(1, back_again), new_tail

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}"


def _same_document(segments: Tensor, back: int) -> Tensor:
    """Whether the token `back` places before belongs to the same document: [B, T]."""
    same = torch.zeros_like(segments, dtype=torch.bool)
    same[:, back:] = segments[:, back:] == segments[:, :-back]
    return same
