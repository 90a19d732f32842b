"""What the paper computes, as it prints it."""

from jpmhc.paper import generators
from jpmhc.paper.methods import METHODS, cauchy, transform
from jpmhc.paper.panel import PanelConfig, panel

__all__ = ["METHODS", "PanelConfig", "cauchy", "generators", "panel", "transform"]
