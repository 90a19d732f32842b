"""Write tables, figures and pages from computed results."""
