"""The measurements of ``python -m experiments.profile``, one file per command.

Begin reading at on_ranks.py, then backward.py and method_steps.py, which `bench` and `doctor` use too.
"""
