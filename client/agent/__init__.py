"""The resident process of a device: it owns data, network, private state and adapter, and answers over gRPC."""
