"""DeepSeek-V4.1: the connections of DeepSeek-V4, whose read weights serve the sublayer after their own.

The first sublayer reads stream 0, and the read of the last connection takes the place of a head. This is
`HyperConnectionStack(connections, reduce=True, delayed=True)`.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from jpmhc.dialects import keys, mhc

_TEMPLATES = {
    "layers.{}.attn": "layers.{}.hc_attn_[part]",
    "layers.{}.ffn": "layers.{}.hc_ffn_[part]",
}
_NAMINGS = {
    "huggingface": keys.Naming("model.", _TEMPLATES, mhc.SAME_NAMES),
    "original": keys.Naming("", _TEMPLATES, mhc.SAME_NAMES),
}
# The draft layers below "mtp" have connections of another kind.
DIALECT = mhc.Dialect("DeepSeek-V4.1", _NAMINGS, r"(?<!mtp)\.\d+\.hc_(attn|ffn|head)|^hc_head")
dump = DIALECT.dump


def load(
    state_dict: Mapping[str, Tensor],
    *,
    streams: int = 4,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> dict[str, nn.Module]:
    """Make the connections of a DeepSeek-V4.1 model from its state dict.

    Args:
        state_dict: The model's tensors under Hugging Face's or the original names; other tensors are left alone.
        streams: `hc_mult` of the model's configuration.
        iterations: `hc_sinkhorn_iters`.
        eps: `hc_eps`.
        norm_eps: `rms_norm_eps`.

    Returns:
        A `HyperConnection` for each of "layers.0.attn", "layers.0.ffn", …; there is no head.
    """
    return DIALECT.load(state_dict, streams, iterations, eps, norm_eps)
