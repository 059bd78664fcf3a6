"""The laboratory: what proves the product, which imports nothing of it. A room for each proof."""
