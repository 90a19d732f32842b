"""Hyper-connections: modules that connect a model's layers by n parallel residual streams."""

from jpmhc.connections.coefficients import Coefficients
from jpmhc.connections.ends import StreamExpansion, StreamHead
from jpmhc.connections.hyper import HyperConnection
from jpmhc.connections.parameters import load_plain_weights, parameter_groups
from jpmhc.connections.sharding import parallelize_connections, shard_connections
from jpmhc.connections.stack import HyperConnectionStack
from jpmhc.connections.streams import expand_streams, reduce_streams
from jpmhc.mixers import MIXERS, Mixer

__all__ = [
    "MIXERS",
    "Coefficients",
    "HyperConnection",
    "HyperConnectionStack",
    "Mixer",
    "StreamExpansion",
    "StreamHead",
    "expand_streams",
    "load_plain_weights",
    "parallelize_connections",
    "parameter_groups",
    "reduce_streams",
    "shard_connections",
]
