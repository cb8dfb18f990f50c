"""Measurements of what a step costs, each a folder with a command of ``python -m experiments.bench``.

Begin reading at tables.py, then step/command.py.
"""
