"""What ``python -m experiments.profile`` measures, one file per command.

Begin reading at on_ranks.py, then backward.py and method_steps.py, by which `bench` and `doctor` measure too.
"""
