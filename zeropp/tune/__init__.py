"""Search for the best feasible Plan of a contender on a cluster. Imports no torch."""
