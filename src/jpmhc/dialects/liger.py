"""Liger-Kernel's `LigerMHC`: the connections of DeepSeek-V4 with the Sinkhorn matrix itself, not its transpose.

A `LigerMHC` may wrap any layer, so a model's author chooses the sites: each path with an `alpha_res` in the state dict
is a connection. The projection `phi` is stored transposed, and the scales are stored as three numbers.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from jpmhc import checks
from jpmhc.dialects import keys, mhc

_ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")


def load(
    state_dict: Mapping[str, Tensor],
    *,
    streams: int = 4,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    read_eps: float = 0.0,
    write_peak: float = 2.0,
) -> dict[str, nn.Module]:
    """Make the connections of a model with `LigerMHC` modules from its state dict.

    Args:
        state_dict: The model's tensors; tensors that are not a connection's are ignored.
        streams: The number of streams, `hc` of the modules.
        iterations: The number of Sinkhorn iterations, `tmax`.
        eps: Added in the Sinkhorn iterations, `sinkhorn_eps`.
        norm_eps: The norm's eps, `rms_eps`.
        read_eps: Added to the read weights, `pre_eps`.
        write_peak: The largest write weight, `post_mult`.

    Returns:
        A dict from the path of each module to its `HyperConnection`.

    Example:
        >>> import jpmhc, torch
        >>> weights = {"blocks.0.attn.phi": torch.zeros(32, 24), "blocks.0.attn.b": torch.zeros(24)}
        >>> weights |= {f"blocks.0.attn.alpha_{part}": torch.ones(()) for part in ("pre", "post", "res")}
        >>> list(jpmhc.dialects.liger.load(weights, streams=4))
        ['blocks.0.attn']
    """
    checks.whole_number(streams, "streams")
    checks.whole_number(iterations, "iterations")
    keys.check_state_dict(state_dict)
    sites = [key.removesuffix(_ALPHAS[-1]) for key in state_dict if f".{key}".endswith(f".{_ALPHAS[-1]}")]
    if not sites:
        raise ValueError("the state dict has no keys of LigerMHC, such as 'blocks.0.attn.alpha_res'")
    connections: dict[str, nn.Module] = {}
    settings: dict[str, Any] = {"transposed": False, "read_eps": read_eps, "write_peak": write_peak}
    for site in sites:
        for name in ("phi", "b", *_ALPHAS):
            if site + name not in state_dict:
                raise ValueError(f"the key {site + name!r} is missing from the state dict")
            keys.check_numbers(state_dict[site + name], site + name)
        phi, base, *alphas = (state_dict[site + name] for name in ("phi", "b", *_ALPHAS))
        parts = {"fn": phi.mT.contiguous(), "base": base, **dict(zip(mhc.SCALES, alphas))}
        path = site.removesuffix(".")
        connections[path] = mhc.make_scaled_connection(
            mhc.join_scales(parts, path), streams, eps, norm_eps, path, iterations=iterations, **settings
        )
    return connections


def dump(connections: Mapping[str, nn.Module], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of connections that `load` made, under the names of `LigerMHC`.

    Args:
        connections: The connections by path, as `load` returns them.
        prefix: The text before every key.

    Example:
        >>> import jpmhc, torch
        >>> weights = {"attn.phi": torch.zeros(32, 24), "attn.b": torch.zeros(24)}
        >>> weights |= {f"attn.alpha_{part}": torch.ones(()) for part in ("pre", "post", "res")}
        >>> connections = jpmhc.dialects.liger.load(weights)
        >>> jpmhc.dialects.liger.dump(connections).keys() == weights.keys()
        True
    """
    state: dict[str, Tensor] = {}
    for path, module in connections.items():
        site = f"{prefix}{path}." if path else prefix
        parts = mhc.read_parts(module, path, "LigerMHC", "Sinkhorn's matrix")
        state |= {f"{site}phi": parts["fn"].mT.contiguous(), f"{site}b": parts["base"]}
        state |= {site + name: scale.reshape(()) for name, scale in zip(_ALPHAS, parts["scale"])}
    return state
