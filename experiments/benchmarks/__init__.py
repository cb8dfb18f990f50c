"""What ``python -m experiments.bench`` measures, one file per benchmark.

May import: config to profiles. Begin reading at step.py.
"""
