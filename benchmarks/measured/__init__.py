"""What measured runs say: their step times out of logs (``logs``), the constants of a cluster that
explain them (``fit``), and the cause that explains the distance from the price best (``causes``).
"""
