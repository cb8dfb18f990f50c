"""The checks of ``python -m experiments.doctor``: the machine, a measured link, and predictions for sparse methods.

Begin reading at findings.py, then machine.py and link.py.
"""
