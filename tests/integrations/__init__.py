"""Training engines of other packages around models with hyper-connections."""
