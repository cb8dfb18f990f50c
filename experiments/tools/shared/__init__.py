"""Code shared by several tools: methods by name, sources of gradients, times of selection."""
