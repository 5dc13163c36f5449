"""Protocols of the papers and speed benchmarks; composes the other rooms, nothing imports it.

`python -m benchmarks --help` lists what there is.
"""
