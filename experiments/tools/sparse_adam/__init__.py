"""Compare optimizers for sparse updates: laws for single elements, and short trainings.

Begin reading at forms.py, then laws.py; screen.py trains with the same variants.
"""
