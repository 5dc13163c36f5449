"""The resident agent of a device: it owns data, network, private state and adapter, and predicts over gRPC."""
