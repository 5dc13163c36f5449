"""Messages between server and clients: typed requests and replies, their arrays, and the interface of transports.

- `requests`, `replies`: one frozen dataclass for each kind of request and reply; nothing else knows how a field is
  spelled on the wire.
- `record`: the plain form (values and named arrays) that every transport carries, and the codec of the dataclasses.
- `arrays`: numpy arrays as bytes and in the memory layout of networks.
- `transport`: the interface of everything that runs clients.
- `flower`, `grid`, `inbox`: Flower's messages and grids, and every trick that Flower's internals require.
"""
