"""``bench gpu``: what a machine with GPUs does with this code, as one report to paste into an issue.

Begin reading at command.py and parts.py, then training.py.
"""
