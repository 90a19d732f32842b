"""The paper's own methods, as printed in the paper."""

from jpmhc.paper import generators
from jpmhc.paper.methods import METHODS, cauchy, transform
from jpmhc.paper.one_layer import layer_cauchy, low_rank_spectrum, matrix_cauchy
from jpmhc.paper.panel import PanelConfig, panel

__all__ = [
    "METHODS",
    "PanelConfig",
    "cauchy",
    "generators",
    "layer_cauchy",
    "low_rank_spectrum",
    "matrix_cauchy",
    "panel",
    "transform",
]
