"""What ops over tokens read of other ranks' rows, as the tables that they take: shifts, convolutions, running sums."""
