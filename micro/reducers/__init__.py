"""From n gradients to one update: the pipeline that sparse methods share, and what does not fit into it."""
