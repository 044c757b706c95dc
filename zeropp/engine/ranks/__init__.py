"""How ranks meet: ``collectives`` (groups, messages), ``lanes`` (overlap), ``given_rows`` (data),
``errors`` (one rank's error reaches all) and ``cuda_settings``."""
