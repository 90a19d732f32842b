"""The whole Jacobian as a matrix, by one backward pass for each row, many rows at a time."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from jpmhc.diagnose.jacobian import Jacobian
from jpmhc.diagnose.spectrum import Spectrum


def measure_matrix(jacobian: Jacobian, chunk: int, progress: Callable[[int], None] | None = None) -> Tensor:
    """Compute J as a matrix on the CPU. [M, N]

    Args:
        jacobian: The Jacobian.
        chunk: Rows at a time.
        progress: Called with the number of rows done since the last call.
    """
    rows, columns = jacobian.shape
    like = jacobian.at.y
    matrix = torch.empty(rows, columns, dtype=like.dtype)
    for begin in range(0, rows, chunk):
        count = min(chunk, rows - begin)
        units = torch.zeros(count, rows, dtype=like.dtype, device=like.device)
        units[torch.arange(count), torch.arange(begin, begin + count)] = 1
        matrix[begin : begin + count] = jacobian.multiply_transposed(units).cpu()
        if progress is not None:
            progress(count)
    return matrix


def spectrum_of(matrix: Tensor, precision: torch.dtype | None = None) -> Spectrum:
    """Compute the singular values of a matrix in float64; the matrix is never squared.

    Args:
        matrix: [M, N]
        precision: The type that the matrix was computed in, its own by default: the floor follows from it.
    """
    values = np.sort(torch.linalg.svdvals(matrix.double()).numpy())[None]
    floor = torch.finfo(precision or matrix.dtype).eps * float(values.max()) * max(matrix.shape) ** 0.5
    return Spectrum(
        values, np.full_like(values, 1 / values.shape[1]), (matrix.shape[0], matrix.shape[1]), "dense", floor
    )
