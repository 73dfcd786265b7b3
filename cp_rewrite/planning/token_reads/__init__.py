"""Tables of the rows that ops over tokens read of other ranks: shifts, convolutions, running sums."""
