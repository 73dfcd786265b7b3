"""What ranks tell each other through the group's store: texts that must be equal, and how far each is."""
