"""Discrete-event run of a Plan: time, memory and Timeline. Imports no torch."""
