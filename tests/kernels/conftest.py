"""Tests run on plain PyTorch and on the Triton kernels: compiled on a GPU, else interpreted.

Uninitialised memory is NaN, so that a row nobody wrote cannot pass for a right one.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mage_kernels import dispatch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INSTALL = 'Triton is not installed: pip install "triton>=3.7,<3.8"'
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def interpret_triton() -> None:
    """Make Triton interpret what is imported from now on.

    Its own functions (`tl.sum`, `tl.cdiv`) are bound to one mode at import, and transformers
    imports it: an earlier test module may have done so. The C++ part cannot be loaded twice, nor
    need be.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]


if HAS_TRITON and DEVICE == "cpu":
    interpret_triton()


@pytest.fixture(autouse=True)
def _nan_where_nothing_was_written() -> Iterator[None]:
    if DEVICE == "cuda":
        torch.full((2**28,), float("nan"), device=DEVICE)  # freed at once, and given out again
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(DEVICE == "cpu")  # fills uninitialised memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device on which the Triton kernels run; what is called goes to them."""
    if not HAS_TRITON:
        pytest.skip(INSTALL)
    if DEVICE == "cpu":
        patch_once_a_launch(monkeypatch)
    monkeypatch.setattr(dispatch, "BACKEND", dispatch.Backend(frozenset({DEVICE}), "a test"))
    return DEVICE


def patch_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter patch `triton.language` once in a launch for each module of functions.

    It would do so at each call of a function by a kernel, `tl.sum` among them, which takes half of
    its time.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = dict[int, Any]()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in patched:
            patched[module] = patch(function)
        return patched[module]

    def launch_anew(*args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(*args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)


@pytest.fixture(params=["plain", "triton"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the test's tensors live; once for each implementation."""
    if request.param == "triton":
        return request.getfixturevalue("triton_kernels")
    monkeypatch.setattr(dispatch, "BACKEND", dispatch.Backend(frozenset(), "a test"))
    return "cpu"
