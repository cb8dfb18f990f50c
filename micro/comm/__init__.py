"""Communication: the requests of a reduction, the loop that answers them, process groups, simulated ranks."""
