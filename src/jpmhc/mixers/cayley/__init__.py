from jpmhc.mixers.cayley.pytorch_form import Cayley

__all__ = ["Cayley"]
