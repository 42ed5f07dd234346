"""Step tables: each algorithm on one tile, as rows of primitive operations."""
