"""The row's tokens, documents and chunks in a mask's terms."""
