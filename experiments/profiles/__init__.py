"""What ``python -m experiments.profile`` measures, one file per command.

May import: config to studies. Begin reading at measure_on_ranks.py, then backward.py.
"""
