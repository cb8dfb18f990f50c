"""Run studies: grids of runs on this machine or as SLURM arrays.

May import: config to training. Begin reading at study.py, then local_sweep.py, then slurm_queue.py.
"""
