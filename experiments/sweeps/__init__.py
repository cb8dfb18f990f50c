"""Many runs: a study's grid on this machine or as SLURM arrays, its live table and its summaries.

May import: config to training. Begin reading at local_sweep.py, then slurm_queue.py.
"""
