"""``bench step``: the reduction of every method, beside its floor or beside an older revision of this code.

Begin reading at command.py, then measure.py; what takes the steps is experiments/tools/profile/method_steps.py.
"""
