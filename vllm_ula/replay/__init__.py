"""Replaying selections against cache policies: recorded ones or synthetic ones, no engine."""
