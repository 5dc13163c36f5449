"""`make demo`: four sites with folders of their own, real processes over TLS, a shift after deployment, and a page."""
