"""``featsync check``: whether a pipeline delivers the rows of its tables, on one rank or more."""
