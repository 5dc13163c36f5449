"""Tables of the papers: protocols (TOML), cells, runs, kept results, pages."""
