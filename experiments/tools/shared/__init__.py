"""Code shared by several tools: options, methods by name, sources of gradients, times of selection, and reports."""
