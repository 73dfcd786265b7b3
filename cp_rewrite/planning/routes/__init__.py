"""Routes: which rows travel between ranks, as the tables that ops read."""
