"""Benchmarks: tables of the papers and measurements of speed. Nothing else imports this package."""
