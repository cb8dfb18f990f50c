"""What planner and simulator know: schedules, costs of collectives, volumes of methods, measured traces, theory.

Nothing in micro imports it. Begin reading at traces.py and tables.py, then schedules/base.py and costs.py.
"""
