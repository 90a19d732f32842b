"""What the paper's methods require of a network; `chain` takes those that they refuse."""

from jpmhc.spectra.network import Network


def require_isotropic(network: Network, method: str) -> None:
    """Raise an error unless the network is of the paper's model: Gaussian noise, the same in every direction."""
    if not network.isotropic:
        raise ValueError(
            f"method '{method}' needs isotropic noise, and this network's is structured (read and write vectors or "
            "a covariance); use 'chain'"
        )
    require_gaussian_streams(network, method)


def require_gaussian_streams(network: Network, method: str) -> None:
    """Raise an error for what no method of the paper knows: other sublayers, slopes, tied weights, the model's ends."""
    if not network.gaussian_streams:
        raise ValueError(
            f"method '{method}' knows independent Gaussian noise and the Jacobian of all streams, not other sublayers, "
            "unequal slopes, tied weights or the model's own ends; use 'auto'"
        )
