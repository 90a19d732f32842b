"""One method a file: each takes a network and points z, and returns a `Solution`."""
