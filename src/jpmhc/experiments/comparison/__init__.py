"""Comparisons of mixers under equal conditions: arms (mixers with options) × learning rates × seeds on one task."""
