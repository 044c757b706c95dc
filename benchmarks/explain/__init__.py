"""Reads configurations of other programs and answers with the simulator: will it fit, what takes
the time, and which settings would be better.

A reader per dialect (``torchtitan``, ``megatron``, ``huggingface``) makes a ``Reading``: what a
file says in this suite's words, and what it says that has no price here. ``question`` joins it with
the command line, ``answer`` prices it, ``screen`` prints it. Two dialects also write plans.
"""
