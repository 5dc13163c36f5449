"""Real processes that are killed, refused and cut off: `make test-faults`."""
