"""How key and value rows travel under each kind of exchange: `take` brings them, `give_back` their gradients home."""
