"""Soak: trainings that are disturbed at chosen moments and given again until they end. Begin reading at __main__.py.

A case follows from its seed (case.py): a run of one method, and faults at moments of it. A moment is the n-th time
that a process of the run reaches a point of its program (points.py), so a seed repeats its case on any machine. The
undisturbed run says how often each point is reached, and with which weights the disturbed one has to end (trial.py).
"""
