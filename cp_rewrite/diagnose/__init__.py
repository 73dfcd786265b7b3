"""Reports, checks and measurements. What trains needs none of it but the comparison of masks and the log."""
