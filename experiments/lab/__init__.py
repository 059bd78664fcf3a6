"""The laboratory: what proves the product. Nothing outside imports it; a room a folder."""
