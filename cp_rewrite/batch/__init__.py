"""One batch on this rank: cut it, plan it, hand its plan to compiled graphs, put results together."""
