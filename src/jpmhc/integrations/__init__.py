"""Hyper-connections for the training engines of other packages; each module needs the package that it is named for."""
