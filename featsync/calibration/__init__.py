"""Measures what rows cost by each transport on this machine, and makes a profile of it."""
