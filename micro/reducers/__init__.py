"""From n gradients to one update: the pipeline that sparse methods share, and methods that do not fit into it."""
