"""What passes hand on to one another: frozen values."""
