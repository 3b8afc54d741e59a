"""Benchmarks: one module per question, each with the bare limit in the same run."""
