"""Megatron-LM: two dialects with the same keys and shapes, for Megatron's branches "dev" and "main".

Both branches divide the projection by a token's root mean square plus eps, where DeepSeek-V4 adds eps under the root.
Otherwise "dev" computes as DeepSeek-V4. With `mhc_single_pass`, "dev" computes as DeepSeek-V4.1: eps is under the root,
and each connection's read weights are for the next sublayer. "main" multiplies the streams by Sinkhorn's matrix without
transposing it, adds no eps to the reads, and ends with the mean of the streams. In the Sinkhorn iterations "main" does
not add eps to the sums of rows and columns, but replaces sums below 1e-6 by 1e-6. This package's matrices are equal to
the matrices of "main" unless a sum is below 1e-6.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections import StreamHead
from jpmhc.dialects import keys, mhc

_ALPHAS = dict(zip(mhc.SCALES, ("alpha_pre", "alpha_post", "alpha_res")))
_LAYERS = {
    "layers.{}.attn": "layers.{}.self_attention_hyper_connection.[part]",
    "layers.{}.ffn": "layers.{}.mlp_hyper_connection.[part]",
}
_PARTS = {"": {"fn": "mapping_proj.weight", "base": "bias", **_ALPHAS}, "head": {part: part for part in keys.PARTS}}
_MARKER = r"(^|\.)((self_attention|mlp)_hyper_connection\.|hc_head_)"
_HEAD = "hc_head_"  # in every key of a learned head, which only "dev" has
BRANCHES = {
    "main": mhc.Dialect(
        "Megatron's branch main",
        {"megatron": keys.Naming("decoder.", _LAYERS, _PARTS)},
        _MARKER,
        mean_head=True,
        skip="Sinkhorn's matrix",
    ),
    "dev": mhc.Dialect(
        "Megatron's branch dev",
        {"megatron": keys.Naming("decoder.", {**_LAYERS, "head": "hc_head_[part]"}, _PARTS)},
        _MARKER,
    ),
}
_NEGLIGIBLE = 1e-12  # in place of a zero eps: the Sinkhorn iterations need an eps to work on logits of any size


def load(
    state_dict: Mapping[str, Tensor],
    *,
    branch: str | None = None,
    streams: int = 4,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    single_pass: bool = False,
) -> dict[str, nn.Module]:
    """Make the connections of a model that Megatron-LM trained from its state dict.

    Args:
        state_dict: The model's tensors; tensors that are not a connection's are ignored.
        branch: The branch of Megatron-LM that trained the model, "main" or "dev". It may be left out if the model has a
            learned head, which only "dev" has; the other keys are the same in both branches.
        streams: The number of streams, `num_residual_streams` of the configuration.
        iterations: The number of Sinkhorn iterations, `mhc_sinkhorn_iterations`.
        eps: For "dev" only, added to the reads and in the Sinkhorn iterations; `mhc_epsilon` with `single_pass`.
        norm_eps: The norm's eps; `layernorm_epsilon` with `single_pass`.
        single_pass: `mhc_single_pass` of "dev"; use the connections in a `HyperConnectionStack(…, delayed=True)`.

    Returns:
        A `HyperConnection` for each of "layers.0.attn", "layers.0.ffn", …, and a `StreamHead` for "head" if the model
        has one.

    Example:
        >>> import jpmhc, torch
        >>> parts = {"mapping_proj.weight": torch.zeros(24, 32), "bias": torch.zeros(24)}
        >>> parts |= {f"alpha_{part}": torch.ones(1) for part in ("pre", "post", "res")}
        >>> sites = ("self_attention_hyper_connection", "mlp_hyper_connection")
        >>> weights = {f"decoder.layers.0.{site}.{part}": parts[part] for site in sites for part in parts}
        >>> list(jpmhc.dialects.megatron.load(weights, branch="main", streams=4))
        ['layers.0.attn', 'layers.0.ffn', 'head']
    """
    keys.check_state_dict(state_dict)
    branch = _check_branch(branch, any(_HEAD in key for key in state_dict))
    settings: dict[str, Any] = {"iterations": iterations, "norm": "rms" if single_pass else "rms_outside"}
    if branch == "main":
        if single_pass:
            raise ValueError('single_pass is a setting of Megatron\'s branch "dev"')
        eps, settings = _NEGLIGIBLE, {**settings, "transposed": False, "read_eps": 0.0}
    return BRANCHES[branch].make_connections(state_dict, streams, eps, norm_eps, **settings)


def dump(
    connections: Mapping[str, nn.Module], *, branch: str | None = None, prefix: str | None = None
) -> dict[str, Tensor]:
    """Return the tensors of connections that a dialect's `load` made, under Megatron's names.

    Args:
        connections: The connections by site, as `load` returns them.
        branch: The branch of Megatron-LM that will load the tensors, "main" or "dev". It may be left out if the
            connections have a learned head.
        prefix: The text before every key, in place of "decoder.".

    Example:
        >>> import jpmhc, torch
        >>> parts = {"fn": torch.zeros(24, 32), "base": torch.zeros(24), "scale": torch.ones(3)}
        >>> weights = {f"layers.0.hc_{site}_{part}": parts[part] for site in ("attn", "ffn") for part in parts}
        >>> connections = jpmhc.dialects.deepseek_v4.load(weights)
        >>> next(iter(jpmhc.dialects.megatron.dump(connections, branch="dev")))
        'decoder.layers.0.self_attention_hyper_connection.mapping_proj.weight'
    """
    keys.check_connections(connections)
    learned = any(isinstance(module, StreamHead) and module.kind == "learned" for module in connections.values())
    return BRANCHES[_check_branch(branch, learned)].dump(connections, prefix=prefix)


def _check_branch(branch: str | None, learned_head: bool) -> str:
    """Return the branch, or "dev" for None with a learned head. Raise an error if the branch is unknown or unclear."""
    if branch is None and not learned_head:
        raise ValueError(
            "Megatron's branches main and dev use the same keys for different formulas: "
            'say branch="main" or branch="dev"'
        )
    if branch is None:
        return "dev"
    checks.choice(branch, BRANCHES, "branch of Megatron")
    if branch == "main" and learned_head:
        raise ValueError('Megatron\'s branch main has no learned head, and these weights have one: say branch="dev"')
    return branch
