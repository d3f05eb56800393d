"""Bytes that the kernels move, counted in the interpreter, against the models in their docstrings."""

import os

import pytest
import torch
from reference import random_problem

from hf_linattn.ops import LinearAttentionState
from hf_linattn.ops.triton import decode, decode_step, launch, triton_linear_attention

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("only the interpreter can count loads and stores", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


@pytest.fixture
def moved(monkeypatch):
    """{kernel: [bytes loaded, bytes stored]}, of live elements only: what a mask hides is not read."""
    counts, running = {}, []
    call = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_call(self, *args, **kwargs):
        running.append(counts.setdefault(self.fn.__name__, [0, 0]))
        try:
            return call(self, *args, **kwargs)
        finally:
            running.pop()

    def size(pointers, mask):
        return int(mask.data.sum()) * pointers.dtype.element_ty.primitive_bitwidth // 8

    def counted_load(self, pointers, mask, *rest):
        running[-1][0] += size(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        running[-1][1] += size(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(GridExecutor, "__call__", counted_call)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
    return counts


def models(B, T, Hq, Hk, F, E, s, N, X, Y, start, mask, packed_states):
    """The docstrings' formulas; `start`: every segment has a state to start from, `packed_states`: several segments."""
    b = B * T
    state, mu, nu = 4 * N * Hk * (F * E + F), 4 * N * Hk * F * E, 4 * N * Hk * F
    seen = Hk * b * mask
    return {
        "forward_kernel": (
            X * s * b * (Hq * F + Hk * F) + s * b * Hk * E + X * seen + start * (mu + X * nu),
            s * b * Hq * E + 4 * b * Hq + (not packed_states) * state,
        ),
        "key_sums_kernel": (X * s * b * Hk * F + s * b * Hk * E + X * seen, state),
        "query_sums_kernel": (X * s * b * Hq * F + s * b * Hq * E + X * 8 * b * Hq, state),
        "delta_kernel": (2 * s * b * Hq * E, 4 * b * Hq),
        "grad_query_kernel": (
            s * b * (Hq * F + Hk * F + Y * Hq * E + Y * Hk * E) + 8 * Y * b * Hq + Y * seen + start * state,
            s * b * Hq * F,
        ),
        "grad_key_kernel": (
            s * b * (Hq * F + Hk * F + Y * Hq * E + Y * Hk * E) + 8 * Y * b * Hq + Y * seen + state,
            s * b * Hk * F + (not packed_states) * state,
        ),
        "grad_value_kernel": (
            s * b * (X * Hq * F + X * Hk * F + Hq * E) + 4 * X * b * Hq + X * seen + mu,
            s * b * Hk * E,
        ),
    }


@pytest.mark.parametrize(
    "dtype, split", [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)], ids=str
)
def test_bytes_are_those_of_the_model(moved, monkeypatch, dtype, split):
    B, T, Hq, Hk, F, E = (1, 130, 2, 1, 20, 24) if split else (1, 20, 2, 1, 200, 40)
    if split:
        monkeypatch.setattr(launch, "multiprocessors", lambda device: 8)
        monkeypatch.setattr(launch, "SEGMENT", 16)
    made = random_problem(B, T, Hq, Hk, F, E, state="elu1", dtype=dtype)
    mask = torch.ones(B, T, dtype=torch.bool)  # a masked key is not read, which the model does not count
    leaves = made.leaves()
    out, state = triton_linear_attention(
        leaves.q, leaves.k, leaves.v, feature_map="elu1", key_mask=mask, output_final_state=True,
        initial_state=LinearAttentionState(*leaves.initial_state),
    )  # fmt: skip
    torch.autograd.grad([out, *state], leaves.tensors(), [torch.ones_like(x) for x in (out, *state)])
    tiles = [launch.tiles(over, F, E, dtype, 0, None, "elu1").count for over in ("values", "features")]
    plan = launch.plan(B, T, B * Hk * tiles[0], None, made.q.device)
    assert plan.split == split == (max(tiles) == 1)
    expected = models(B, T, Hq, Hk, F, E, made.q.element_size(), plan.rows, *tiles, True, True, split)
    if split:
        # the first sums serve forward and backward; both scans read and write each sum of mu and of nu once
        expected["key_sums_kernel"] = tuple(2 * n for n in expected["key_sums_kernel"])
        own = 4 * plan.rows * Hk * (F * E + F)
        ends = 4 * B * Hk * (F * E + F)
        expected["scan_kernel"] = (3 * own + 3 * ends, 3 * own + 2 * ends)
    for name in moved:
        assert tuple(moved[name]) == expected[name], name
    assert set(moved) == {name for name in expected if split or "sums" not in name}


@pytest.mark.parametrize("dtype, split", [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_bytes_of_the_noncausal_form(moved, monkeypatch, dtype, split):
    B, T, S, Hq, Hk, F, E = (1, 70, 150, 2, 1, 20, 24) if split else (1, 20, 36, 2, 1, 200, 40)
    if split:
        monkeypatch.setattr(launch, "multiprocessors", lambda device: 8)
        monkeypatch.setattr(launch, "SEGMENT", 16)
    leaves = random_problem(B, T, Hq, Hk, F, E, S=S, dtype=dtype).leaves()
    out, _ = triton_linear_attention(
        leaves.q, leaves.k, leaves.v, feature_map="elu1", causal=False, key_mask=torch.ones(B, S, dtype=torch.bool)
    )
    torch.autograd.grad(out.sum(), leaves.tensors())
    X, Y = (launch.tiles(over, F, E, dtype, 0, None, "elu1").count for over in ("values", "features"))
    queries, keys = (launch.plan(B, length, B * Hk * X, None, out.device) for length in (T, S))
    assert queries.split == keys.split == split == (max(X, Y) == 1)
    s, b, c, N, M = out.element_size(), B * T, B * S, queries.rows, keys.rows
    mu, nu = 4 * Hk * F * E, 4 * Hk * F
    expected = {
        "key_sums_kernel": (X * s * c * Hk * F + s * c * Hk * E + X * Hk * c, M * (mu + nu)),
        "query_sums_kernel": (X * s * b * Hq * F + s * b * Hq * E + X * 8 * b * Hq, N * (mu + nu)),
        "delta_kernel": (2 * s * b * Hq * E, 4 * b * Hq),
        # over the queries for out, then over the keys for dv
        "read_kernel": (
            X * s * b * Hq * F + N * (mu + X * nu) + X * s * c * Hk * F + X * Hk * c + M * mu,
            s * b * Hq * E + 4 * b * Hq + s * c * Hk * E,
        ),
        # dq, then dk
        "grad_read_kernel": (
            s * b * (Hq * F + Y * Hq * E) + 8 * Y * b * Hq + N * (mu + nu)
            + s * c * (Hk * F + Y * Hk * E) + Y * Hk * c + M * (mu + nu),
            s * b * Hq * F + s * c * Hk * F,
        ),
    }  # fmt: skip
    if split:
        expected["scan_kernel"] = ((N + M) * (mu + nu), 2 * B * (mu + nu))
    assert {name: tuple(both) for name, both in moved.items()} == expected


@pytest.mark.parametrize("E", [24, 256])
def test_a_token_reads_and_writes_its_state_once(moved, E):
    B, Hq, Hk, F = 2, 4, 2, 128
    made = random_problem(B, 1, Hq, Hk, F, E, state="elu1", dtype=torch.bfloat16)
    mu, nu = made.initial_state
    decode_step(made.q, made.k, made.v, mu, nu, feature_map="elu1")
    X = -(-E // decode.value_block(F, E))
    loaded, stored = moved["decode_kernel"]
    tickets = 0 if X == 1 else 4 * B * Hk
    assert loaded == 2 * B * (X * Hk * F + Hk * E + X * Hq * F) + 4 * B * Hk * (F * E + X * F)
    assert stored == 2 * B * Hq * E + 4 * B * Hk * (F * E + F) + tickets


@pytest.fixture
def flops(monkeypatch):
    """{kernel: operations of its products}."""
    done, running, run, dot = {}, [], GridExecutor.__call__, InterpreterBuilder.create_dot

    def counted_run(self, *args, **kwargs):
        running.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    def counted_dot(self, a, b, *rest):
        (rows, inner), columns = a.data.shape, b.data.shape[1]
        done[running[-1]] = done.get(running[-1], 0) + 2 * rows * inner * columns
        return dot(self, a, b, *rest)

    monkeypatch.setattr(GridExecutor, "__call__", counted_run)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted_dot)
    return done


def test_products_are_those_of_the_model(flops):
    """Where no tile is padded, the operations of every product add up to the docstrings' flops."""
    B, T, Hq, Hk, F, E, BT = 1, 32, 2, 1, 64, 128, 16
    made = random_problem(B, T, Hq, Hk, F, E, dtype=torch.float32).leaves()
    out, _ = triton_linear_attention(made.q, made.k, made.v, feature_map="elu1", chunk_size=BT)
    torch.autograd.grad(out.sum(), made.tensors())
    X, Y = (launch.tiles(over, F, E, torch.float32, 0, BT, "elu1").count for over in ("values", "features"))
    assert min(X, Y) > 1
    own, states = Hq * BT * (F + E), (Hq + Hk) * F * E
    assert flops == {
        "forward_kernel": 2 * B * T * (own + (X - 1) * Hq * BT * F + states),
        "grad_query_kernel": 2 * B * T * (own + (Y - 1) * Hq * BT * E + states),
        "grad_key_kernel": 2 * B * T * (own + (Y - 1) * Hq * BT * E + states),
        "grad_value_kernel": 2 * B * T * (own + (X - 1) * Hq * BT * F + states),
    }


def test_products_of_the_noncausal_form(flops):
    """Each of the six passes over queries or keys costs 2 F E a token and head, whatever the tiles."""
    B, T, S, Hq, Hk, F, E = 1, 32, 64, 2, 1, 64, 128
    made = random_problem(B, T, Hq, Hk, F, E, S=S, dtype=torch.float32).leaves()
    out, _ = triton_linear_attention(made.q, made.k, made.v, feature_map="elu1", causal=False)
    torch.autograd.grad(out.sum(), made.tensors())
    queries, keys = 2 * B * T * Hq * F * E, 2 * B * S * Hk * F * E
    assert flops == {
        "key_sums_kernel": keys,
        "read_kernel": queries + keys,
        "grad_read_kernel": queries + keys,
        "query_sums_kernel": queries,
    }


def test_traffic_of_a_long_sequence_does_not_grow_with_the_state():
    """One pass with a state in registers moves q, k, v and out once; the state itself is noise from 64 tokens on."""
    at = lambda T: models(1, T, 8, 8, 64, 64, 2, 1, 1, 1, True, False, False)["forward_kernel"]  # noqa: E731
    slope = (sum(at(2048)) - sum(at(1024))) / 1024
    assert slope == 8 * (2 * (64 + 64 + 64 + 64) + 4)
