"""The models of the experiments: the recursive transformer, the language decoder and the ARC decoder."""
