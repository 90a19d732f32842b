"""Jacobian spectra: describe a network (`Network`), solve it (`cauchy`, `density`), and compare (`simulate`)."""

from jpmhc.spectra import trace
from jpmhc.spectra.activations import Activation
from jpmhc.spectra.chain.solve import cauchy
from jpmhc.spectra.density import Density, density
from jpmhc.spectra.distances import Distances, distances
from jpmhc.spectra.edges_and_moments import edges, moments
from jpmhc.spectra.growth import growth_edges, layers_until_collapse, projector_rate, share_of_growth_below
from jpmhc.spectra.network import SKIPS, Network
from jpmhc.spectra.propagation import MLP, Propagation, propagate
from jpmhc.spectra.schemes import SCHEMES, Anderson, AndersonNewton, Newton, Plain
from jpmhc.spectra.simulate import simulate, simulate_nonlinear
from jpmhc.spectra.solution import Solution, Transform
from jpmhc.spectra.summary import Summary, gap_radii, geometric_mean, gradient_gains, share_below, summary

__all__ = [
    "MLP",
    "SCHEMES",
    "SKIPS",
    "Activation",
    "Anderson",
    "AndersonNewton",
    "Density",
    "Distances",
    "Network",
    "Newton",
    "Plain",
    "Propagation",
    "Solution",
    "Summary",
    "Transform",
    "cauchy",
    "density",
    "distances",
    "edges",
    "gap_radii",
    "geometric_mean",
    "gradient_gains",
    "growth_edges",
    "layers_until_collapse",
    "moments",
    "projector_rate",
    "propagate",
    "share_below",
    "share_of_growth_below",
    "simulate",
    "simulate_nonlinear",
    "summary",
    "trace",
]
