"""Optimizers for elements that receive the sum of several steps at once: laws for single elements, and short trainings.

May import: what studies may. Begin reading at forms.py, then laws.py; screen.py trains with the same forms.
"""
