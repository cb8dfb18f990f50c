"""Optimizers for elements that receive the sum of several steps at once: laws for single elements, and short trainings.

Begin reading at forms.py, then laws.py; screen.py trains with the same forms.
"""
