"""Parameters as flat shards (``flat``, on a ``flat_layout``): gathered for compute, their gradients
summed and reduced. ``whole`` ones one rank updates; ``tied`` ones two stages share."""
