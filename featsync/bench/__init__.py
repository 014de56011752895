"""Compares pipelines: a process for each configuration and rank, wrong rows beside every speed."""
