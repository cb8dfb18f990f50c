"""Benchmarks of a step, one folder per command of ``python -m experiments.bench``.

Begin reading at tables.py, then step/command.py.
"""
