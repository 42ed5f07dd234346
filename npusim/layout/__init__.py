"""Coordinate to index functions and their algebra."""
