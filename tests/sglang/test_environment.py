"""The environment is the one that was asked for, and nothing in it can pass by way of a GPU."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PINS = Path(__file__).with_name("requirements.txt").read_text().split()


def test_every_package_has_the_version_that_is_pinned() -> None:
    wanted = dict(pin.split("==") for pin in PINS)
    assert {name: version(name).partition("+")[0] for name in wanted} == wanted


def test_the_stand_in_for_cuda_kernels_can_be_imported_and_not_called() -> None:
    from sgl_kernel.quantization import awq_dequantize

    with pytest.raises(RuntimeError, match="needs a GPU"):
        awq_dequantize()


def test_the_shims_are_in_every_process() -> None:
    assert "sglang_on_cpu" in sys.modules
