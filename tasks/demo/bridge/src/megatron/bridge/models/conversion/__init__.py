"""Weight mappings and the conversion that walks them."""
