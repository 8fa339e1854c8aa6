"""The one family of the demo: a small decoder that adds two digits."""
