"""Measurements of what a step costs, each a folder or a file with the command of ``python -m experiments.bench``.

May import: config to studies, ranks, profiles. Begin reading at tables.py, then step/command.py.
"""
