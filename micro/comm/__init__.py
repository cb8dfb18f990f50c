"""How ranks exchange messages: the requests of a reduction, who answers them, process groups, simulated ranks."""
