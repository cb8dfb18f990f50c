"""``bench step``: time every method's reduction, relative to its floor or to an older revision of this code.

Begin reading at command.py, then measure.py; experiments/tools/profile/method_steps.py runs the steps.
"""
