"""What ranks are given: batches of the group, or rows of their own, now or ahead of time."""
