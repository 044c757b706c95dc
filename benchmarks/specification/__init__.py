"""What is asked for: conf/ and a command line in, a frozen and validated RunSpec out.

Read in this order: ``run_spec`` (the nouns and their checks), ``compose`` (Hydra and presets),
``contenders`` (which planner and which trainer a contender has).
"""
