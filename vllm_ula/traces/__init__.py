"""Traces: what a serving run asked of its rows, as a stream of small records."""
