"""Models of a training step: measured traces, costs of collectives, schedules of buckets, and the theory of top-k.

Nothing in micro imports it. Begin with traces.py and tables.py, then schedules/base.py and costs.py.
"""
