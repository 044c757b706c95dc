"""ZeroPP as a contender: ``contender`` says what can be set, how knobs become a Plan and what the
tuner tries; ``trainer`` is what runs per rank, the library's own ``parallelize``."""
