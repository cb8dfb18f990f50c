"""What ``python -m experiments.profile`` measures, one file per command.

May import: config to studies. Begin reading at backward.py.
"""
