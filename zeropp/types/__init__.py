"""What all parts of the library share: words, degrees, sizes, settings, operators and timelines.

Plain values, and where the data files are, without torch and without any other part of the library.
"""
