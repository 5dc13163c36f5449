"""Arrays in Flower's messages: as the bytes that travel, or by reference where nothing has to.

Server and client both send and read them and may not import one another, so they have a room of their own; it knows
Flower and numpy, and nothing of the project.
"""
