"""The end of a step: ``optimizer`` updates shards by ``update_rules``, which find how a caller's
optimizer updates; ``optimizer_state`` saves and loads what it keeps."""
