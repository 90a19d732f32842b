"""Training of the recursive model and of the ARC decoder: configurations, loops, checkpoints and logs."""
