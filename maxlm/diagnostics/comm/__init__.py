"""Benchmarks of collectives and comparison of hosts: `maxlm bench-comm`, and `maxlm doctor --cluster`."""
