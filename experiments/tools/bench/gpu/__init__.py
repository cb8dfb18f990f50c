"""``bench gpu``: test and benchmark a machine with GPUs, in one report to paste into an issue.

Begin reading at command.py and parts.py, then training.py.
"""
