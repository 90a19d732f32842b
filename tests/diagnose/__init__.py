"""Tests of `jpmhc.diagnose`."""
