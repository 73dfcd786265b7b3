"""How masks group the tokens of a document: by nodes of trees, chunks and spans. `table` lists them."""
