"""What keeps a client's own contribution from the server: secure aggregation and differential privacy.

- `sharing`, `masking`: secrets in shares, keys, masks, and numbers as integers that can be summed under masks.
- `sums`: a reply as the vector that is summed, and the mean reply of a sum.
- `gaussian`: clipping, Gaussian noise, and the (ε, δ) of several releases.

Client and server use this package (`fedtta.client.privacy`, `fedtta.server.secure`); it knows neither of them.
"""
