"""The convolution against its sum written out: y_t = sum_j w_j x_{t - K + 1 + j} over real tokens of one document."""

import pytest
import torch
from helpers import assert_same_bits, pull_back
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close

from hf_linattn.layers import ShortConvolution


def convolution(channels, kernel, seed=0):
    layer = ShortConvolution(channels, kernel).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(channels, kernel, generator=torch.Generator().manual_seed(seed)))
    return layer


def by_hand(weight, x, tail, mask, segments):
    """Loops over rows, tokens and taps; zeros on masked tokens. Also the last K - 1 real inputs of each row."""
    kernel = weight.shape[1]
    rows, tails = [], []
    for b in range(len(x)):
        history = [(None if segments is None else -1, x_) for x_ in tail[b]]  # (document, input)
        out = []
        for t in range(x.shape[1]):
            if not mask[b, t]:
                out.append(torch.zeros_like(x[b, t]))
                continue
            history.append((None if segments is None else int(segments[b, t]), x[b, t]))
            y = torch.zeros_like(x[b, t])
            for back in range(kernel):
                document, value = history[-1 - back]
                if document == history[-1][0]:
                    y = y + weight[:, kernel - 1 - back] * value
            out.append(y)
        rows.append(torch.stack(out))
        tails.append(torch.stack([value for _, value in history[len(history) - kernel + 1 :]]))
    return torch.stack(rows), torch.stack(tails)


@st.composite
def problems(draw):
    kernel, rows, length = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(rows, length, 3, generator=g, dtype=torch.float64)
    tail = torch.randn(rows, kernel - 1, 3, generator=g, dtype=torch.float64) if draw(st.booleans()) else None
    mask = (
        torch.rand(rows, length, generator=g) > draw(st.sampled_from([0.2, 0.6, 1.0])) if draw(st.booleans()) else None
    )
    segments = None
    if tail is None and draw(st.booleans()):
        segments = (torch.rand(rows, length, generator=g) > 0.6).cumsum(1)
    return convolution(3, kernel), x, tail, mask, segments


@settings(max_examples=40)
@given(problem=problems())
def test_it_is_its_definition(problem):
    layer, x, tail, mask, segments = problem
    x.requires_grad_()
    inputs = [x, layer.weight] if tail is None else [x, layer.weight, tail.requires_grad_()]
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    out, new_tail = layer(x, tail, mask, segments)
    start = x.new_zeros(len(x), layer.kernel_size - 1, 3) if tail is None else tail
    expected, expected_tail = by_hand(layer.weight, x, start, real, segments)
    assert_close(out[real], expected[real], 1e-12)
    assert_close(new_tail, expected_tail, 1e-12)

    actual = pull_back([out[real], new_tail], inputs)
    assert_close(actual, pull_back([expected[real], expected_tail], inputs), 1e-12, "gradient")


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=5), kernel=st.integers(2, 5))
def test_cut_and_carried_on_by_its_tail(lengths, kernel):
    layer = convolution(3, kernel)
    x = torch.randn(2, sum(lengths), 3, dtype=torch.float64)
    expected, expected_tail = layer(x)
    outs, tail = [], None
    for part in x.split(lengths, 1):
        out, tail = layer(part, tail)
        outs.append(out)
    assert_close(torch.cat(outs, 1), expected, 1e-12)
    assert_close(tail, expected_tail, 1e-12)


@pytest.mark.parametrize("poison", [1e30, float("nan"), float("inf")])
def test_nothing_under_the_mask_matters(poison):
    layer = convolution(3, 4)
    mask = torch.tensor([[1, 0, 1, 0, 0, 1, 1, 0]]).bool()
    outcomes = []
    for value in (0.0, poison):
        x = torch.randn(1, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        x = x.masked_fill(~mask.unsqueeze(-1), value).requires_grad_()
        out, tail = layer(x, None, mask)
        outcomes.append([out[mask], tail, *pull_back([out[mask], tail], [x])])
    assert_same_bits(outcomes[1], outcomes[0])


def test_it_starts_as_the_identity():
    layer, x = ShortConvolution(3, 4), torch.randn(2, 6, 3)
    assert_same_bits([layer(x)[0]], [x])
    assert_same_bits([layer.initial_weight()], [layer.weight])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype(dtype):
    layer = convolution(3, 4).to(dtype)
    out, tail = layer(torch.randn(2, 6, 3, dtype=dtype))
    assert out.dtype == tail.dtype == dtype
    out, tail = layer(torch.randn(2, 1, 3, dtype=dtype), tail)
    assert out.dtype == tail.dtype == dtype


@pytest.mark.parametrize("kernel", [1, 0, -2])
def test_a_kernel_that_reaches_nowhere_is_refused(kernel):
    with pytest.raises(ValueError, match=f"kernel_size={kernel} must be at least 2"):
        ShortConvolution(3, kernel)
