"""Who owns which tokens, what each rank's attention then does, and what that costs. numpy only: no torch."""
