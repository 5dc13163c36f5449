"""The sources of the documentation site, and what generates its tables and figures."""
