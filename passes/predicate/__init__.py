"""The meaning of a mask: read symbolically, decided by cases. `decide` carries one mask through all steps."""
