"""What a mask means: read symbolically, decided by cases. `decide` carries one mask through all steps."""
