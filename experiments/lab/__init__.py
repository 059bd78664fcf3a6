"""The laboratory: what proves the product. No product module imports it."""
