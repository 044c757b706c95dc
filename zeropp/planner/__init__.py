"""From a request to a Plan: degrees, then cuts and order. Imports no torch.

``degrees`` fills in ``auto`` degrees and refuses what no contender could run; ``orders`` makes the
orders of a ZeroPP step, among which the simulator chooses.
"""
