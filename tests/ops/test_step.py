"""The decoding step that writes into the state: the recurrence, in six operations."""

from dataclasses import replace

import pytest
import torch
from reference import NONNEGATIVE, assert_close, random_problem
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linattn.ops import decode_step, make_feature_map, recurrent_linear_attention

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-8}
VIEWS = {
    "view",
    "transpose",
    "unsqueeze",
    "squeeze",
    "expand",
    "flatten",
    "unflatten",
    "select",
    "t",
    "detach",
    "slice",
}


class Launches(TorchDispatchMode):
    """The operations that do work on the device, by name: all but views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name.removeprefix("_").removesuffix("_view") not in VIEWS and name != "_unsafe_view":
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def one_token(**options):
    return random_problem(**{"B": 2, "T": 1, "Hq": 4, "Hk": 2, "D": 6, "E": 5, "state": "elu1", **options})


def step(problem, name="elu1", **options):
    """(out, mu, nu), written into clones of the initial state."""
    mu, nu = (s.clone() for s in problem.initial_state)
    mask = problem.key_mask
    out = decode_step(
        problem.q, problem.k, problem.v, mu, nu, feature_map=name, normalize=problem.normalize, key_mask=mask, **options
    )
    return out, mu, nu


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NONNEGATIVE)
def test_is_the_recurrence(name, dtype):
    made = one_token(dtype=dtype, state=name)
    feature_map = make_feature_map(name, 6, 4, 2)
    out, mu, nu = step(made, feature_map)
    expected = made.run(recurrent_linear_attention, feature_map)
    assert out.dtype == dtype
    assert_close(out, expected[0], TOLERANCE[dtype])
    assert_close((mu, nu), expected[1:], TOLERANCE[dtype] if dtype == torch.float64 else 1e-5)


def test_without_denominator():
    made = one_token(normalize=False, state="identity")
    assert_close(step(made, "identity"), made.run(recurrent_linear_attention, "identity"), 1e-10)


def test_many_steps_are_the_whole():
    whole = one_token(T=9)
    mu, nu = (s.clone() for s in whole.initial_state)
    outs = [
        decode_step(whole.q[:, i : i + 1], whole.k[:, i : i + 1], whole.v[:, i : i + 1], mu, nu, feature_map="elu1")
        for i in range(9)
    ]
    assert_close((torch.cat(outs, 1), mu, nu), whole.solve("elu1"), 1e-10)


def test_a_masked_key_leaves_the_state():
    made = one_token(mask="holes")
    made = replace(made, key_mask=torch.tensor([[True], [False]]))
    nan = float("nan")
    poisoned = replace(made, k=made.k.clone(), v=made.v.clone())
    poisoned.k[1], poisoned.v[1] = nan, nan
    out, mu, nu = step(poisoned)
    assert_close((out, mu, nu), made.run(recurrent_linear_attention, "elu1"), 1e-10)
    assert torch.equal(mu[1], made.initial_state[0][1])


def test_a_denominator_of_zero_gives_zero():
    made = one_token()
    made = replace(made, initial_state=tuple(torch.zeros_like(s) for s in made.initial_state), k=-made.k.abs())
    out, mu, nu = step(made, "relu")
    assert not out.any()
    assert not mu.any()
    nan = replace(made, q=torch.full_like(made.q, float("nan")))
    assert step(nan, "exp")[0].isnan().all()


def test_the_state_may_be_a_view():
    made = one_token()
    both = torch.cat([made.initial_state[0], made.initial_state[1].unsqueeze(-1)], -1)
    out = decode_step(made.q, made.k, made.v, both[..., :-1], both[..., -1], feature_map="elu1")
    assert_close((out, both[..., :-1], both[..., -1]), made.run(recurrent_linear_attention, "elu1"), 1e-10)


@pytest.mark.parametrize("normalize, most", [(True, 6), (False, 3)])
@pytest.mark.parametrize("batch", [1, 3])
def test_at_most_six_launches(normalize, most, batch):
    made = one_token(B=batch, dtype=torch.float32, normalize=normalize)
    with Launches() as launches:
        step(replace(made, initial_state=made.initial_state), None)
    names = [name for name in launches.names if name != "clone"]  # the two of this test
    assert len(names) <= most, names


@pytest.mark.parametrize("change, words", [
    ({"q": 2}, "decode_step takes one token a row, got T=2"),
    ({"backend": "native"}, "backend='native' has no decoding step"),
    ({"backend": "triton"}, "backend='triton' cannot run this call"),
    ({"half": True}, "mu and nu must be torch.float32"),
])  # fmt: skip
def test_bad_input(change, words):
    made = one_token(T=change.get("q", 1), dtype=torch.float32)
    if change.get("half"):
        made = replace(made, initial_state=tuple(s.half() for s in made.initial_state))
    before = [s.clone() for s in made.initial_state]
    with pytest.raises((ValueError, RuntimeError), match=words):
        decode_step(
            made.q, made.k, made.v, *made.initial_state, feature_map="elu1", backend=change.get("backend", "auto")
        )
    assert all(torch.equal(a, b) for a, b in zip(made.initial_state, before))
