"""Number formats: recipes of matrix products, float8, block-scaled formats, 8-bit copies."""
