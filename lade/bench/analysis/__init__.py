"""Figures computed from results."""
