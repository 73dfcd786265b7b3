"""What a dry run foretells of a machine that it does not run on: memory, times and bytes; and pages that show it."""
