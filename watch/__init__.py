"""What an operator sees: live pages of runs and devices, their metrics, and alerts."""
