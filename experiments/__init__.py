"""Experiments and benchmarks: each run is recorded; tables and plots only read runs."""
