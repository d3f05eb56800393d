"""The decoding step against the recurrent form: in place, over several steps, in one or several tiles."""

import pytest
import torch
from reference import assert_close, random_problem

from hf_linattn.ops import LinearAttentionState, make_feature_map, recurrent_linear_attention
from hf_linattn.ops.triton import decode, decode_step, triton_linear_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def steps(T=4, mask=None, dtype=torch.float32, D=8, E=8, normalize=True, name="elu1", B=2, Hq=4, Hk=2):
    """(q, k, v, mask) of T tokens, and the state to start from."""
    made = random_problem(B, T, Hq, Hk, D, E, mask=mask, state="elu1", dtype=dtype)
    state = [s.to(DEVICE) for s in made.initial_state]
    return [x if x is None else x.to(DEVICE) for x in (made.q, made.k, made.v, made.key_mask)], state


@pytest.mark.parametrize(
    "options, name, normalize",
    [
        ({}, "elu1", True),
        ({}, "softmax", True),
        ({}, "identity", False),
        ({"mask": "first"}, "elu1", True),
        ({"D": 20, "E": 80, "T": 2}, "softmax", True),
        ({"D": 256, "E": 48, "T": 2, "B": 1}, "elu1", True),
        ({"dtype": torch.bfloat16}, "elu1", True),
    ],
    ids=str,
)
def test_equals_the_recurrent_form(options, name, normalize):
    (q, k, v, mask), (mu, nu) = steps(**options)
    expected, state = recurrent_linear_attention(
        q, k, v, feature_map=name, key_mask=mask, normalize=normalize, output_final_state=True,
        initial_state=LinearAttentionState(mu.clone(), nu.clone()),
    )  # fmt: skip
    places = mu.data_ptr(), nu.data_ptr()
    for i in range(q.shape[1]):
        token = slice(i, i + 1)
        out = decode_step(
            q[:, token], k[:, token], v[:, token], mu, nu, feature_map=name, normalize=normalize,
            key_mask=None if mask is None else mask[:, i],
        )  # fmt: skip
        assert out.dtype == v.dtype
        assert_close(out.cpu(), expected[:, token].cpu(), 2**-8 if v.dtype == torch.bfloat16 else 1e-5)
    assert (mu.data_ptr(), nu.data_ptr()) == places
    assert_close((mu.cpu(), nu.cpu()), tuple(s.cpu() for s in state), 1e-5)


def test_several_tiles_share_the_key_summary():
    """The programs of a head read nu before the last of them writes it, and the tickets are back at zero."""
    assert decode.value_block(256, 48) == 16  # three tiles
    (q, k, v, _), (mu, nu) = steps(T=1, D=256, E=48)
    expected = nu + k[:, 0].clamp(max=0).exp() + k[:, 0].clamp(min=0)
    decode_step(q, k, v, mu, nu, feature_map="elu1")
    assert_close(nu.cpu(), expected.cpu(), 1e-6)
    assert decode._tickets
    assert not any(tickets.any() for tickets in decode._tickets.values())


def test_masked_key_leaves_the_state_as_it_is():
    (q, k, v, _), (mu, nu) = steps(T=1)
    before = mu.clone(), nu.clone()
    nan = torch.full_like(k, float("nan"))
    mask = torch.tensor([True, False], device=DEVICE)
    out = decode_step(q, torch.where(mask[:, None, None, None], k, nan), v, mu, nu, feature_map="elu1", key_mask=mask)
    assert out.isfinite().all()
    assert torch.equal(mu[1], before[0][1])
    assert torch.equal(nu[1], before[1][1])
    assert not torch.equal(mu[0], before[0][0])


def test_zero_denominator_gives_zero():
    (q, k, v, _), (mu, nu) = steps(T=1)
    out = decode_step(-q.abs(), k.abs(), v, mu.zero_(), nu.zero_(), feature_map="relu")
    assert not out.any()


def test_a_map_that_no_kernel_has():
    feature_map = make_feature_map("taylor2", 4, 4, 2).to(DEVICE)
    (q, k, v, _), _ = steps(T=1, D=4)
    mu, nu = torch.zeros(2, 2, 21, 8, device=DEVICE), torch.zeros(2, 2, 21, device=DEVICE)
    expected, _ = recurrent_linear_attention(q, k, v, feature_map=feature_map)
    assert_close(decode_step(q, k, v, mu, nu, feature_map=feature_map).cpu(), expected.cpu(), 1e-5)


def test_single_token_of_the_public_form_is_the_same_and_leaves_its_state():
    (q, k, v, _), (mu, nu) = steps(T=1)
    state = LinearAttentionState(mu.clone(), nu.clone())
    with torch.no_grad():
        out, final = triton_linear_attention(
            q, k, v, feature_map="elu1", initial_state=state, output_final_state=True
        )  # fmt: skip
    assert torch.equal(state.mu, mu)
    assert torch.equal(out, decode_step(q, k, v, mu, nu, feature_map="elu1"))
    assert torch.equal(final.mu, mu)
    assert torch.equal(final.nu, nu)


def test_errors_name_the_argument():
    (q, k, v, _), (mu, nu) = steps(T=2)
    with pytest.raises(ValueError, match="T=2"):
        decode_step(q, k, v, mu, nu, feature_map="elu1")
    one = [x[:, :1] for x in (q, k, v)]
    with pytest.raises(ValueError, match="mu is updated in place"):
        decode_step(*one, mu.half(), nu, feature_map="elu1")
    with pytest.raises(ValueError, match="nu is updated in place"):
        decode_step(*one, mu, nu.clone().requires_grad_(), feature_map="elu1")
    with pytest.raises(ValueError, match="initial_state has mu"):
        decode_step(*one, mu[:, :1], nu, feature_map="elu1")
