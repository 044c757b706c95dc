"""What a user asks the suite to run.

In: the YAML files of ``conf/`` and a command line. Out: a frozen, validated RunSpec per point, or
a SpecError of one line (``spec_error``). Read ``run_spec`` (the fields and their checks),
``compose`` (Hydra and presets), ``contenders`` (the registration of contenders), ``command`` (how
commands end) and ``progress`` (how they show progress).
"""
