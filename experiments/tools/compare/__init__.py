"""The comparison of all methods on the same gradients, of ``python -m experiments.compare``.

Begin reading at trial.py, then measure.py and report.py.
"""
