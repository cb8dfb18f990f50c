"""``bench network`` and ``bench network_rounds``: training on hosts that are joined by links of a known rate.

Begin reading at links.py and command.py, then training.py and prediction.py; local steps are in rounds.py.
"""
