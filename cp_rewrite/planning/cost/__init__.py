"""The cost of attention: tiles of a kernel, speeds of a device, seconds under an exchange, and the cheapest
exchange."""
