"""How fast things are, as ratios of what is measured in turns in one run; nothing here is a test."""
