"""Entry points: each module here runs as ``python -m experiments.NAME``."""
