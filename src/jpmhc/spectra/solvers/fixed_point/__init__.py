"""Batched fixed-point schemes: many small independent problems solved side by side."""
