"""The watch over the ranks and the hosts of a run: who stands still or is gone is found, named and ended.

May import: what launching may. Begin reading at beats.py and stalls.py, then rank_watch.py and host_watch.py.
"""
