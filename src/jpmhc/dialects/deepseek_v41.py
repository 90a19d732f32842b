"""DeepSeek-V4.1: the connections of DeepSeek-V4, but each connection's read weights are for the next sublayer.

The first sublayer reads stream 0, and the read of the last connection replaces the head.
`HyperConnectionStack(connections, reduce=True, delayed=True)` computes this.
"""

from jpmhc.dialects import keys, mhc

_NAMINGS = {
    "huggingface": keys.Naming("model.", mhc.LAYERS_WITH_TENSORS),
    "original": keys.Naming("", mhc.LAYERS_WITH_TENSORS),
}
# The draft layers below "mtp" have connections of another kind.
DIALECT = mhc.Dialect("DeepSeek-V4.1", _NAMINGS, r"(?<!mtp)\.\d+\.hc_(attn|ffn|head)|^hc_head")
load, dump = DIALECT.load, DIALECT.dump
