"""The paper's experiment: the recursive model, its tasks and its training."""
