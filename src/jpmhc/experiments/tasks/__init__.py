"""The tasks that models learn, and the interface that all tasks share (`task.py`)."""
