"""Holds public simulators of training against the same published rows as the suite's own.

``python -m benchmarks.studies.simulators FOLDER`` (``__main__``) asks them and writes their answers
to results/reference/simulators. Read ``runs`` (a published row as numbers that need no suite), one
adapter per simulator (``calculon``, ``dlcalc``, ``llm_analysis``, ``simumax``), ``worker`` (asks
one adapter in an environment of its own), ``install`` (where the simulators come from) and
``compare`` (the errors).

An adapter names every assumption in its docstring and has two functions. ``refusal`` says why the
simulator cannot express a run, or nothing; ``step_s`` asks the simulator for the seconds of a step.
Adapters import nothing of the suite. What a simulator itself refuses is recorded in its own words.
"""
