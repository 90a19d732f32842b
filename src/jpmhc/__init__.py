"""Hyper-connections on manifolds, the Jacobian spectra they give, and the recursive model they were made for."""

__version__ = "0.1.0"
