"""Compare all methods on the same gradients, for ``python -m experiments.compare``.

Begin reading at trial.py, then measure.py and report.py.
"""
