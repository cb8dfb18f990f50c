"""Pages of published runs: one table of runs, a small yaml for each page, its tables and figures."""
