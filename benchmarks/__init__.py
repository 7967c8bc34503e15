"""Benchmarks: ``python -m benchmarks NAME --json [--quick]``. See benchmarks/common.py."""
