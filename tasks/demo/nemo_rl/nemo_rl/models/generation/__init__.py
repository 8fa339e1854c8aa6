"""Generation in Hugging Face's layout."""
