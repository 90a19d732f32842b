"""Checks of arguments that the functions of this package share: skips, numbers per layer, read and write vectors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jpmhc import checks

_LARGEST_ENTRY = 1e100  # of a skip: products and squares of a few such numbers overflow


def to_skips(value: Tensor | np.ndarray | Sequence, name: str = "skips", depth: int | None = None) -> Tensor:
    """Return one square matrix per layer, [L, n, n].

    Args:
        value: The matrices [L, n, n], or, if a depth is given, one matrix [n, n] for all layers.
        name: The value's name in an error message.
        depth: The required number of layers; None allows any number.
    """
    skips = checks.real_tensor(value, name)
    if skips.ndim not in (2, 3) or skips.shape[-1] != skips.shape[-2] or 0 in skips.shape:
        raise ValueError(
            f"{name} must be square matrices, one per layer [L, n, n] with at least one layer and one stream, "
            f"not of shape {list(skips.shape)}"
        )
    if float(skips.abs().max()) > _LARGEST_ENTRY:
        raise ValueError(f"{name} must have entries of at most {_LARGEST_ENTRY:g}, not {float(skips.abs().max()):g}")
    if skips.ndim == 2:
        if depth is None:
            raise ValueError(
                f"{name} must be square matrices, one per layer [L, n, n]; one matrix [n, n] needs a depth"
            )
        return skips.expand(checks.whole_number(depth, "depth"), -1, -1)
    if depth is not None and depth != len(skips):
        raise ValueError(f"depth {depth} contradicts the {len(skips)} layers of {name}; leave the depth out")
    return skips


def to_layer_numbers(value: Tensor | Sequence[float] | float, name: str, like: Tensor) -> Tensor:
    """Return one non-negative number per layer [L], repeating a single number; L is the length of `like` [L, ...]."""
    numbers = checks.real_tensor(value, name).to(like.device)
    if numbers.ndim == 0:
        numbers = numbers.expand(len(like)).clone()
    if numbers.shape != like.shape[:1]:
        raise ValueError(f"{name} must be one number or one per layer [{len(like)}], not {list(numbers.shape)}")
    if bool((numbers < 0).any()):
        raise ValueError(f"{name} must not be negative, got {float(numbers.min()):g}")
    return numbers


def to_read_and_write(
    read: Tensor | Sequence | None, write: Tensor | Sequence | None, skips: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the read and write vectors [L, n], or (None, None) without them; a single vector [n] serves all layers."""
    if read is None and write is None:
        return None, None
    if read is None or write is None:
        raise ValueError("give both read and write vectors (the hyper-connection block) or neither (isotropic noise)")
    shape = skips.shape[:2]
    vectors = []
    for value, name in ((read, "read"), (write, "write")):
        vector = checks.real_tensor(value, name).to(skips.device)
        vector = vector.expand(shape[0], -1) if vector.ndim == 1 else vector
        if vector.shape != shape:
            raise ValueError(f"{name} must be [L, n] = {list(shape)}, not {list(vector.shape)}")
        vectors.append(vector)
    return vectors[0], vectors[1]


def to_correlations(value: Tensor | Sequence, skips: Tensor) -> Tensor:
    """Return the correlations of the layers' noises [L, L]; `value` is this matrix or one label per layer [L].

    Layers with the same label have correlation one, layers with different labels correlation zero."""
    tied = checks.real_tensor(value, "tied").to(skips.device)
    if tied.ndim == 1:
        tied = (tied.unsqueeze(0) == tied.unsqueeze(1)).double()
    good = tied.shape == (len(skips), len(skips)) and bool((tied == tied.mT).all() and (tied.diagonal() == 1).all())
    if not good or float(torch.linalg.eigvalsh(tied)[0]) < -1e-9:
        raise ValueError(
            f"tied must be one label per layer [{len(skips)}] or the correlations of the layers' noises, a symmetric "
            f"positive semidefinite matrix [{len(skips)}, {len(skips)}] with ones on its diagonal"
        )
    return tied


def check_points(z: Tensor, device: torch.device) -> Tensor:
    """Return spectral points as complex128 on the device; raise ValueError unless all lie above the real axis."""
    try:
        points = torch.as_tensor(z, dtype=torch.complex128, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"spectral points must be complex numbers or a tensor of them, not {z!r}") from None
    if points.numel() == 0 or not bool((torch.isfinite(points) & (points.imag > 0)).all()):
        raise ValueError(
            "spectral points must be at least one, finite and above the real axis: z = x + i eta with eta > 0"
        )
    return points
