"""Benchmarks: every variant beside its peers, in time, memory and accuracy.

Run ``python -m benchmarks --list`` in the repository's root for the suites.
"""
