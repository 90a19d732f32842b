r"""Sampled squared singular values of Jacobians $J = Y_L \cdots Y_1$, from the theory's model or nonlinear networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.machine import free_memory, ran_out_of_memory
from jpmhc.spectra.activations import Activation, get_activation
from jpmhc.spectra.network import Network, require_network
from jpmhc.spectra.sublayers import gaussian

# The number of N x N matrices of one sample at the peak, and the share of the free memory that a batch may take.
_ALIVE = 8
_SHARE = 0.5


def simulate(
    network: Network,
    width: int,
    samples: int,
    seed: int = 0,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float64,
    batch: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    r"""Sample networks of finite width and return J's squared singular values, ascending in each sample.

    Singular values below about $10^{-16}$ of a sample's largest one (1e-7 in float32) are rounding errors.

    Args:
        width: Features per stream, p.
        samples: The number of networks to sample. Sample i depends only on the seed and i, not on the batches.
        device: The device; the network's own device by default.
        batch: The number of samples in one batch; by default as many as fit into memory.
        progress: A function that is called with the number of samples finished since its last call.

    Returns:
        The squared singular values. [samples, n * width], or [samples, width] for the model's own map

    >>> simulate(Network.repeated(torch.eye(2), 0.1, 3), width=5, samples=4, seed=0).shape
    torch.Size([4, 10])
    """
    return _in_batches(network, width, samples, seed, device, dtype, batch, progress, _linear_jacobian)


def simulate_nonlinear(
    network: Network,
    activation: str | Activation,
    weight_scale: float,
    width: int,
    samples: int,
    seed: int = 0,
    *,
    input_variance: float = 1.0,
    bias_scale: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float64,
    batch: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    r"""Sample squared singular values of real networks $x \leftarrow A_l x + \phi(W_l x + b)$ at Gaussian inputs.

    The slopes $D_l = \phi'(h_l)$ at $h_l = W_l x + b$ are computed from the input of each sampled network, without the
    theory's mean-field approximation. The argument `network` gives the skips and, if there are any, the read and write
    vectors; its `variance` is not used.

    Args:
        weight_scale: $\sigma_w$: entries of $W_l$ have variance $\sigma_w^2$ divided by the width of $W_l$.
        input_variance: The mean square of the inputs, which are independent in all streams.
        bias_scale: $\sigma_b$.

    >>> simulate_nonlinear(Network.repeated(torch.eye(2), 0.1, 3), "tanh", 0.5, width=5, samples=4, seed=0).shape
    torch.Size([4, 10])
    """
    require_network(network)
    weight_scale = checks.non_negative_number(weight_scale, "weight_scale")
    bias_scale = checks.non_negative_number(bias_scale, "bias_scale")
    input_variance = checks.non_negative_number(input_variance, "input_variance")
    if network.covariance is not None:
        raise ValueError("a network with a general covariance has no nonlinear counterpart; use read and write vectors")
    if network.sublayers is not None or network.tied is not None or network.ends != "streams":
        raise ValueError(
            "nonlinear networks are sampled only without sublayers=, without tied weights and with ends='streams'"
        )
    sample = partial(_nonlinear_jacobian, get_activation(activation), weight_scale, bias_scale, input_variance)
    return _in_batches(network, width, samples, seed, device, dtype, batch, progress, sample)


def refuse_size(streams: int, width: int) -> None:
    """Raise an error if a single sampled network does not fit into memory."""
    checks.fits_memory(
        _ALIVE * (streams * width) ** 2 * 8, f"a sampled network of {streams} streams of {width} features"
    )


def _in_batches(
    network: Network,
    width: int,
    samples: int,
    seed: int,
    device: torch.device | str | None,
    dtype: torch.dtype,
    batch: int | None,
    progress: Callable[[int], None] | None,
    sample: Callable[[Network, int, list[torch.Generator], Tensor], Tensor],
) -> Tensor:
    """Return the squared singular values of matrices from `sample`, drawn in batches that fit into memory.

    `sample` returns a batch of Jacobians for a network, a width, one generator per sample, and the network's skips.

    When memory runs out, the batch is halved and repeated.
    """
    require_network(network)
    network = network.to(device if device is not None else network.skips.device)
    device = network.skips.device
    samples, seed = checks.whole_number(samples, "samples"), checks.whole_number(seed, "seed", 0)
    size = network.streams * checks.whole_number(width, "width, the features per stream,")
    refuse_size(network.streams, width)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"singular values are computed in torch.float32 or torch.float64, not {dtype}")
    batch = None if batch is None else checks.whole_number(batch, "batch")
    if batch is None:
        batch = max(1, int(_SHARE * free_memory(device)) // (_ALIVE * size * size * dtype.itemsize))
    skips = network.skips.to(dtype)
    done: list[Tensor] = []
    start = 0
    while start < samples:
        stop = min(samples, start + batch)
        generators = [torch.Generator(device).manual_seed((seed * 1_000_003 + i) % 2**63) for i in range(start, stop)]
        try:
            values = torch.linalg.svdvals(sample(network, width, generators, skips)).square().flip(-1)
        except RuntimeError as error:
            if batch == 1 or not ran_out_of_memory(error):
                raise
            batch = max(1, batch // 2)
            continue
        done.append(values)
        if progress is not None:
            progress(stop - start)
        start = stop
    return torch.cat(done)


def _normal(generators: list[torch.Generator], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Draw standard normal numbers, with one generator per sample. [b, *shape]"""
    out = like.new_empty(len(generators), *shape)
    for row, generator in zip(out, generators):
        row.normal_(generator=generator)
    return out


def _linear_jacobian(network: Network, width: int, generators: list[torch.Generator], skips: Tensor) -> Tensor:
    """Sample J [b, N, N] with N = n * width, or the model's own map T [b, width, width]."""
    n, count = network.streams, len(generators)
    draw_weights = _weight_source(network, width, generators, skips)
    eye = torch.eye(width, dtype=skips.dtype, device=skips.device)
    if network.ends == "model":
        jacobian = eye.repeat(n, 1).expand(count, -1, -1)
    else:
        jacobian = torch.eye(n * width, dtype=skips.dtype, device=skips.device).expand(count, -1, -1)
    for layer in range(network.depth):
        scale = float(network.variance[layer].sqrt())
        streams = jacobian.unflatten(1, (n, width))
        skipped = torch.einsum("ij,bjpc->bipc", skips[layer], streams)
        weights = draw_weights(layer) * scale
        if network.isotropic:
            noise = (weights @ jacobian).unflatten(1, (n, width))
        elif network.covariance is not None:
            mixed = torch.einsum("kij,bjpc->bkipc", network.covariance[layer].to(skips.dtype), streams)
            noise = torch.einsum("bkqp,bkipc->biqc", weights, mixed)
        else:
            noise = _through_block(network, layer, streams, weights.__matmul__)
        jacobian = skipped.add_(noise).flatten(1, 2)  # eq. jacobian-kronecker, multiplied by the earlier layers
    return jacobian.unflatten(1, (n, width)).mean(1) if network.ends == "model" else jacobian


def _weight_source(
    network: Network, width: int, generators: list[torch.Generator], skips: Tensor
) -> Callable[[int], Tensor]:
    """Return a function that draws the Gaussian matrices of a layer, given the layer's number from 0.

    The matrices are [b, N, N] with N = n * width for isotropic noise, [b, width, width] for the block, and
    [b, K, width, width] for general noise.
    """
    fan = width * (network.streams if network.isotropic else 1)

    def normal(*shape: int) -> Tensor:
        return _normal(generators, shape, skips)

    if network.tied is not None:
        values, vectors = torch.linalg.eigh(network.tied)
        nonzero = values > 1e-12 * values[-1]
        mixing = (vectors[:, nonzero] * values[nonzero].sqrt()).to(skips.dtype)  # [L, rank]
        laws = network.sublayers or (gaussian(),) * network.depth
        owners = mixing.abs().argmax(0).tolist()  # for each set of shared weights, one layer that uses the set
        size = fan if network.isotropic else width
        shared = [laws[layer].sample(normal, size) for layer in owners]
        return lambda layer: sum((m * one for m, one in zip(mixing[layer], shared)), start=torch.zeros_like(shared[0]))
    if network.slopes is not None:
        slopes = network.slopes.to(skips.dtype)
        # Each feature has one path through all layers, because skips connect a feature with itself in the next layer.
        path = (torch.special.ndtr(normal(width)) * len(slopes)).long().clamp_max(len(slopes) - 1)  # [b, width]

        def draw_rows(layer: int) -> Tensor:
            rows = slopes[:, layer][path].sqrt()  # [b, width, n or 1]
            return normal(fan, fan) / fan**0.5 * rows.mT.flatten(1).unsqueeze(-1)

        return draw_rows
    if network.sublayers is not None:
        laws = network.sublayers
        return lambda layer: laws[layer].sample(normal, width)
    if network.covariance is not None:
        terms = network.covariance.shape[1]
        return lambda layer: normal(terms, width, width) / width**0.5
    return lambda layer: normal(fan, fan) / fan**0.5


def _nonlinear_jacobian(
    phi: Activation,
    weight_scale: float,
    bias_scale: float,
    input_variance: float,
    network: Network,
    width: int,
    generators: list[torch.Generator],
    skips: Tensor,
) -> Tensor:
    """Compute J [b, N, N] at one random input of each sampled network; N = n * width."""
    n, size = network.streams, network.streams * width
    signal = _normal(generators, (size, 1), skips) * input_variance**0.5
    eye = torch.eye(size, dtype=skips.dtype, device=skips.device).expand(len(generators), size, size)
    state = torch.cat([eye, signal], -1)
    fan_in = size if network.isotropic else width

    def sublayer(inner: Tensor) -> Tensor:
        weights = _normal(generators, (fan_in, fan_in), skips) * (weight_scale / fan_in**0.5)
        hidden = weights @ inner
        if bias_scale:
            hidden[..., -1:] += _normal(generators, (fan_in, 1), skips) * bias_scale
        before = hidden[..., -1:]
        return torch.cat([phi.derivative(before) * hidden[..., :-1], phi.function(before)], -1)

    for layer in range(network.depth):
        streams = state.reshape(-1, n, width, size + 1)
        skipped = torch.einsum("ij,bjpc->bipc", skips[layer], streams)
        if network.isotropic:
            noise = sublayer(state).reshape(streams.shape)
        else:
            noise = _through_block(network, layer, streams, sublayer)
        state = skipped.add_(noise).reshape(-1, size, size + 1)
    return state[..., :-1]


def _through_block(network: Network, layer: int, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """Read one stream from all streams, apply the sublayer, and write its output to all streams. [b, n, p, c]

    `streams` [b, n, p, c] has c columns: tangent vectors and the signal.
    """
    assert network.read is not None
    assert network.write is not None
    inner = torch.einsum("j,bjpc->bpc", network.read[layer].to(streams.dtype), streams)
    return torch.einsum("i,bpc->bipc", network.write[layer].to(streams.dtype), sublayer(inner))
