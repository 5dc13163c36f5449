"""Speed: ratios measured side by side, part by part."""
