"""``bench network``: benchmark training on hosts with links of a known rate.

Begin reading at command.py, then ways.py, training.py and prediction.py.
"""
