from jpmhc.mixers.mhc_lite.pytorch_form import MHCLite

__all__ = ["MHCLite"]
