"""Compare optimizers for sparse updates: laws for single elements, and the time of a step.

Begin reading at forms.py, then laws.py; speed.py measures a step of the library's optimizer.
"""
