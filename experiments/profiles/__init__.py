"""What ``python -m experiments.profile`` measures, one file per command.

May import: config to studies, ranks. Begin reading at on_ranks.py, then backward.py.
"""
