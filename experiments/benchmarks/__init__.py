"""What ``python -m experiments.bench`` measures, one file per benchmark.

May import: config to studies. Begin reading at step.py.
"""
