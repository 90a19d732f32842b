"""Evaluation: a model answers test rows, the answers are scored, and variants of a puzzle vote.

`scores.py` scores single rows, `votes.py` scores votes, `checkpoints.py` lets the checkpoints of a run answer (`jpmhc
evaluate`, `jpmhc predict`), and `decoding.py` evaluates ARC decoders.
"""
