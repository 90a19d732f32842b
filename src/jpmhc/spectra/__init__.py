"""Jacobian spectra: describe a network (`Network`), solve it (`cauchy`, `density`), and compare (`simulate`)."""

from jpmhc.spectra import trace
from jpmhc.spectra.density import Density, density
from jpmhc.spectra.distances import Distances, distances
from jpmhc.spectra.exactly import edges, moments
from jpmhc.spectra.network import Network
from jpmhc.spectra.propagation import Propagation, propagate
from jpmhc.spectra.random_skips import SKIPS
from jpmhc.spectra.simulate import simulate, simulate_nonlinear
from jpmhc.spectra.solution import Solution
from jpmhc.spectra.solve import cauchy, choose
from jpmhc.spectra.solvers import METHODS
from jpmhc.spectra.solvers.fixed_point import SCHEMES, Anderson, Newton, Plain

__all__ = [
    "METHODS",
    "SCHEMES",
    "SKIPS",
    "Anderson",
    "Density",
    "Distances",
    "Network",
    "Newton",
    "Plain",
    "Propagation",
    "Solution",
    "cauchy",
    "choose",
    "density",
    "distances",
    "edges",
    "moments",
    "propagate",
    "simulate",
    "simulate_nonlinear",
    "trace",
]
