"""The ServerApp: nodes, the round loop, evaluation, and the files of a run."""
