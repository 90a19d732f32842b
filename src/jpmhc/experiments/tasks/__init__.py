"""The tasks that models learn, one folder each, and their contract (`task.py`)."""
