"""What the driver is handed: the arguments where the kernel's parameters lie, and nothing else."""

import ctypes
import struct
from types import SimpleNamespace

import pytest

from jpmhc.kernels import driver

PTX = """
.visible .entry _add(
    .param .u64 .ptr .global .align 1 _add_param_0,
    .param .u32 _add_param_1,
    .param .u64 .ptr .global .align 1 _add_param_2,
    .param .u64 .ptr .global .align 1 _add_param_3
)
.reqntid 64
{ ld.param.b64 %rd1, [_add_param_0]; }
"""


def compiled(ptx: str = PTX, signature=("*fp32", "constexpr", "i32", "*bf16", "constexpr"), **metadata):
    """A kernel as Triton returns it: its second argument is None, its last a constant, one pointer is Triton's own."""
    names = dict(zip("abcde", signature))
    known = {"num_warps": 2, "shared": 1024, "num_ctas": 1} | metadata
    return SimpleNamespace(
        src=SimpleNamespace(signature=names), asm={"ptx": ptx}, metadata=SimpleNamespace(**known), function=77
    )


def test_arguments_lie_as_the_parameters_do(monkeypatch):
    seen = {}

    def launch(*given):
        extra = given[-1]
        size = ctypes.c_size_t.from_address(extra[3]).value
        seen["call"], seen["bytes"] = given[:-1], ctypes.string_at(extra[1], size)
        assert (extra[0], extra[2], extra[4]) == (1, 2, None)
        return 0

    monkeypatch.setattr(driver, "_driver", lambda: launch)
    assert driver.DirectLaunch(compiled()).launch(5, 3, 9, [4096, None, 12, 8192])
    assert seen["call"] == (77, 5, 3, 1, 64, 1, 1, 1024, 9, None)
    # The pointers start at multiples of eight bytes, and the last one is Triton's.
    assert struct.unpack("<QixxxxQQ", seen["bytes"]) == (4096, 12, 8192, 0)


def test_a_refusal_of_the_driver_is_told(monkeypatch):
    monkeypatch.setattr(driver, "_driver", lambda: lambda *given: 201)
    assert not driver.DirectLaunch(compiled()).launch(1, 1, 0, [16, None, 1, 32])


@pytest.mark.parametrize(
    "kernel",
    [
        compiled(global_scratch_size=8),
        compiled(launch_cooperative_grid=True),
        compiled(num_ctas=2),
        compiled(signature=("*fp32", "fp64", "i32", "*bf16", "constexpr")),
        compiled(ptx=".visible .entry _add(\n .param .u64 _add_param_0\n)"),
    ],
)
def test_what_asks_for_more_goes_through_triton(kernel):
    assert driver.can_launch_directly(compiled())
    assert not driver.can_launch_directly(kernel)


def test_packed_launches_hand_over_each_kernels_arguments(monkeypatch):
    """Two kernels that share a pointer; the second launch is on another stream, at other addresses."""
    seen = []

    def launch(config, function, parameters, extra):
        places = (ctypes.c_void_p * 4).from_address(parameters)
        pointers = [ctypes.c_uint64.from_address(places[k]).value for k in (0, 2, 3)]
        number = ctypes.c_int32.from_address(places[1]).value
        fields = struct.unpack("@7IPPI", ctypes.string_at(config, struct.calcsize("@7IPPI")))
        seen.append((function, fields, pointers, number, extra))
        return 0

    monkeypatch.setattr(driver, "_driver", lambda: None)
    monkeypatch.setattr(driver, "_extended_driver", lambda: launch)
    first = [("slot", 0), ("value", None), ("value", 12), ("slot", 1)]
    second = [("slot", 1), ("value", None), ("value", -3), ("slot", 2)]
    packed = driver.PackedLaunches([compiled(), compiled(num_warps=4)], [(5,), (6, 7)], [first, second], 3)
    assert packed.launch([16, 32, 2**40], 9)
    assert packed.launch([48, 64, 80], 11)
    one, other = (5, 1, 1, 64, 1, 1, 1024), (6, 7, 1, 128, 1, 1, 1024)
    assert seen == [
        (77, (*one, 9, 0, 0), [16, 32, 0], 12, None),
        (77, (*other, 9, 0, 0), [32, 2**40, 0], -3, None),
        (77, (*one, 11, 0, 0), [48, 64, 0], 12, None),
        (77, (*other, 11, 0, 0), [64, 80, 0], -3, None),
    ]


def test_packed_launches_tell_a_refusal_of_the_first_kernel_and_stop_at_one_of_a_later(monkeypatch):
    given = [("slot", 0), ("value", None), ("value", 1), ("slot", 0)]
    answers = iter([201, 0, 700])
    monkeypatch.setattr(driver, "_driver", lambda: None)
    monkeypatch.setattr(driver, "_extended_driver", lambda: lambda *call: next(answers))
    packed = driver.PackedLaunches([compiled()] * 2, [(1,)] * 2, [given] * 2, 1)
    assert not packed.launch([16], 0)
    with pytest.raises(RuntimeError, match="refused a kernel"):
        packed.launch([16], 0)
