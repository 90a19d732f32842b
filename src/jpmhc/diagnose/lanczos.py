"""The spectrum of a Jacobian too large for a matrix: Golub–Kahan–Lanczos quadrature from several random vectors."""

from collections.abc import Callable

import numpy as np
import torch

from jpmhc.diagnose.jacobian import Jacobian
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.spectra import trace


def measure_quadrature(
    jacobian: Jacobian, probes: int, steps: int, seed: int, progress: Callable[[int], None] | None = None
) -> Spectrum:
    """Estimate the spectrum from `probes` random vectors, with `steps` products with J and with Jᵀ for each.

    It begins on the Jacobian's smaller side. JᵀJ is never formed, so small singular values are not squared away.

    Args:
        jacobian: The Jacobian.
        probes: Random vectors; their scatter gives the error bars.
        steps: Lanczos steps for each.
        seed: Of the vectors.
        progress: Called with the number of products done since the last call.
    """
    rows, columns = jacobian.shape
    ahead, back, size = jacobian.multiply, jacobian.multiply_transposed, columns
    if rows < columns:
        ahead, back, size = back, ahead, rows
    steps = min(steps, size)

    def counted(product: trace.Operator) -> trace.Operator:
        def multiply(vectors: torch.Tensor) -> torch.Tensor:
            found = product(vectors)
            if progress is not None:
                progress(1)
            return found

        return multiply

    device, generator = jacobian.at.x.device, torch.Generator().manual_seed(seed)
    nodes, weights = [], []
    for _ in range(probes):
        # One vector at a time: the model runs on one vector anyway, and the basis takes the memory of one.
        start = trace.probes(1, size, generator=generator).to(device)
        found = trace.singular_quadrature(counted(ahead), counted(back), start, steps)
        order = found.nodes[0].argsort()
        nodes.append(found.nodes[0][order].sqrt().cpu().numpy())
        weights.append(found.weights[0][order].cpu().numpy())
    values = np.stack(nodes)
    floor = torch.finfo(jacobian.at.x.dtype).eps * float(values.max()) * max(rows, columns) ** 0.5
    return Spectrum(values, np.stack(weights), jacobian.shape, "lanczos", floor)
