"""The tasks that the recursive model learns, one folder each, and what they have in common."""
