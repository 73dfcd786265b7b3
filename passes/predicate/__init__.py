"""What a mask means: read symbolically, decided by cases."""
