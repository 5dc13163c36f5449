"""The ServerApp: who is there, the round loop, what is measured, what is written."""
