"""Simulate training steps from traces, networks and schedules, for ``python -m experiments.simulate``.

Nothing is trained, and no ranks are started. Begin reading at steps.py, then setup.py.
"""
