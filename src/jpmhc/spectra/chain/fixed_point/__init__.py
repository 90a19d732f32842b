"""Ways to iterate a batch of equations: one scheme a file behind one contract, and continuation for good starts."""

from jpmhc.spectra.chain.fixed_point.anderson import Anderson
from jpmhc.spectra.chain.fixed_point.anderson_newton import AndersonNewton
from jpmhc.spectra.chain.fixed_point.contract import Scheme
from jpmhc.spectra.chain.fixed_point.newton import Newton
from jpmhc.spectra.chain.fixed_point.plain import Plain

SCHEMES: dict[str, Scheme] = {
    "anderson": Anderson(),
    "newton": Newton(),
    "anderson_newton": AndersonNewton(),
    "plain": Plain(),
}

__all__ = ["SCHEMES", "Anderson", "AndersonNewton", "Newton", "Plain", "Scheme"]
