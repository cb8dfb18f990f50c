"""``bench network``: training on hosts that are joined by links of a known rate.

Begin reading at command.py, then ways.py, training.py and prediction.py.
"""
