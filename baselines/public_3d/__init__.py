"""Public 3D programs that are priced and not run here, and the bound of all their parts at once.

``offers`` says what each program has, by its released version; the other files are what a
contender's folder has (``knobs``, ``plan``, ``space``, ``contender``), the same for all of them.
"""
