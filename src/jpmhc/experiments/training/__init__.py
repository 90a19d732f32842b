"""Training the recursive model on a task, and evaluating its checkpoints."""
