"""What ``python -m experiments.profile`` measures, one file per command.

May import: config to studies, ranks. Begin reading at on_ranks.py, then backward.py and
method_steps.py, by which benchmarks and the doctor measure too.
"""
