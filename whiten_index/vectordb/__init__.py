"""Vector databases and files that are filled with the rows of an index."""
