"""Evaluation: a model answers test rows, the answers are scored, and variants of a puzzle vote.

`scores.py` has the scores of single rows, `votes.py` those of votes, `answering.py` asks a model about rows, and
`checkpoints.py` does this with the checkpoints of a run, for `jpmhc evaluate` and `jpmhc predict`.
"""
