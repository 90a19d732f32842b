"""Other packages' training engines with hyper-connections; each module needs its package."""
