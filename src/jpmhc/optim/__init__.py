"""Optimisers: AdamAtan2 (weights), NorMuon (hidden matrices), SignSGD (embeddings), Cayley-Adam (Grassmann frames)."""

from jpmhc.optim.adam_atan2 import AdamAtan2
from jpmhc.optim.grassmannian import GrassmannianOptimizer, grassmann_frames
from jpmhc.optim.nor_muon import NorMuon
from jpmhc.optim.sign_sgd import SignSGD

__all__ = ["AdamAtan2", "GrassmannianOptimizer", "NorMuon", "SignSGD", "grassmann_frames"]
