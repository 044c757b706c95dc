"""A rank's layers: ``chunk`` runs them forward and backward, ``deferred`` delays their weight
gradients, ``context`` divides their sequences, ``values`` are what they take and return."""
