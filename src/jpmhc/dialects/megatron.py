"""Megatron-LM: the connections of DeepSeek-V4 with an eps outside the norm's root, under Megatron's names.

Megatron divides the projection by the root mean square of a token plus eps; DeepSeek-V4 adds eps under the root. With
`mhc_single_pass` Megatron does as DeepSeek-V4.1: eps under the root, and reads that are used by the next sublayer.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from jpmhc.dialects import keys, mhc

_ALPHAS = dict(zip(mhc.SCALES, ("alpha_pre", "alpha_post", "alpha_res")))
_NAMINGS = {
    "megatron": keys.Naming(
        "decoder.",
        {
            "layers.{}.attn": "layers.{}.self_attention_hyper_connection.[part]",
            "layers.{}.ffn": "layers.{}.mlp_hyper_connection.[part]",
            "head": "hc_head_[part]",
        },
        {"": {"fn": "mapping_proj.weight", "base": "bias", **_ALPHAS}, "head": mhc.SAME_NAMES[""]},
    )
}
DIALECT = mhc.Dialect("Megatron", _NAMINGS, r"(^|\.)((self_attention|mlp)_hyper_connection\.|hc_head_)")
dump = DIALECT.dump


def load(
    state_dict: Mapping[str, Tensor],
    *,
    streams: int = 4,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    single_pass: bool = False,
) -> dict[str, nn.Module]:
    """Make the connections of a model that Megatron-LM trained from its state dict.

    Args:
        state_dict: The model's tensors; other tensors are left alone.
        streams: `num_residual_streams` of the configuration.
        iterations: `mhc_sinkhorn_iterations`.
        eps: Added to the reads and in the Sinkhorn iterations; with `single_pass` it is `mhc_epsilon`.
        norm_eps: The norm's; with `single_pass` it is `layernorm_epsilon`.
        single_pass: `mhc_single_pass`; use the connections in a `HyperConnectionStack(…, delayed=True)`.

    Returns:
        A `HyperConnection` for each of "layers.0.attn", "layers.0.ffn", …, and a `StreamHead` for "head" if the model
        has one.

    Example:
        >>> import jpmhc, torch
        >>> parts = {"mapping_proj.weight": torch.zeros(24, 32), "bias": torch.zeros(24)}
        >>> parts |= {f"alpha_{part}": torch.ones(1) for part in ("pre", "post", "res")}
        >>> places = ("self_attention_hyper_connection", "mlp_hyper_connection")
        >>> weights = {f"decoder.layers.0.{place}.{part}": parts[part] for place in places for part in parts}
        >>> list(jpmhc.dialects.megatron.load(weights, streams=4))
        ['layers.0.attn', 'layers.0.ffn']
    """
    norm = "rms" if single_pass else "rms_outside"
    return {**DIALECT.make_connections(state_dict, streams, iterations, eps, norm_eps, norm=norm)}
