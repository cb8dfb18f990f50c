"""Soak: trainings that are disturbed, and given again until they end. Begin reading at __main__.py.

A seed stands for a case (case.py): a run of one method, and faults that come some time after a step was recorded. An
attempt starts the command as a user does and carries the faults out (attempt.py). The undisturbed run says with which
weights and records the disturbed one has to end (trial.py).
"""
