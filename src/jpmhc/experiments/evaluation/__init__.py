"""Evaluation: a model answers test rows, the answers are scored, and variants of a puzzle vote.

`scores.py` scores single rows, `votes.py` scores votes, `answering.py` lets a model answer rows, `checkpoints.py`
evaluates the checkpoints of a run (`jpmhc evaluate`, `jpmhc predict`), and `decoding.py` evaluates ARC decoders.
"""
