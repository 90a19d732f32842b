"""Runs made from the files of published Tiny Recursive Models."""
