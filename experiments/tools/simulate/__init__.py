"""Steps of training computed from traces, networks and schedules, of ``python -m experiments.simulate``.

Nothing is trained and no rank runs here. Begin reading at steps.py, then setup.py.
"""
