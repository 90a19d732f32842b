"""What the paper computes, as it prints it."""

from jpmhc.paper import generators

__all__ = ["generators"]
