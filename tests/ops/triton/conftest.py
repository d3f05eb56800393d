"""These tests run kernels: on a GPU if there is one, else in Triton's interpreter, which must be chosen before Triton
is imported. `tests/ops/test_triton.py` runs them so, in a process of their own; by hand it is

    TRITON_INTERPRET=1 pytest tests/ops/triton
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def round_to_nearest(monkeypatch):
    """Round float32 to bfloat16 as the hardware does; the interpreter cuts the bits off."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast(self, source, to):
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return original(self, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)


@pytest.fixture(autouse=True)
def patch_the_language_once(monkeypatch):
    """The interpreter looks for what to patch at every call of a @triton.jit helper; once a launch is enough."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, restore, done = interpreter._patch_builtin, interpreter._LangPatchScope.restore, set()

    def patch_once(package, *arguments):
        if package not in done:
            done.add(package)
            patch(package, *arguments)

    def restore_and_forget(scope):
        done.clear()
        restore(scope)

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_once)
    monkeypatch.setattr(interpreter._LangPatchScope, "restore", restore_and_forget)


@pytest.fixture
def segments(monkeypatch):
    """A GPU with more multiprocessors than there are heads: every document is cut into segments of 64 tokens."""
    from hf_linattn.ops.triton import launch

    monkeypatch.setattr(launch, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(launch, "SEGMENT", 16)
