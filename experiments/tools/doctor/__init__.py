"""What ``python -m experiments.doctor`` checks: the machine, a measured link, and what follows for sparsifying.

Begin reading at findings.py, then machine.py and link.py.
"""
